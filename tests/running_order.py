"""In which order the workers of xdist begin the tests that take longest."""

from __future__ import annotations

LONGEST_FIRST = (
    "tests/world/test_generators.py",  # looks at all modules: 20 times as long once transformers and timm are loaded
    # One behind the other in each worker: they share what their diagnoses start.
    *(f"specimens {share}" for share in ("training 0", "training 2", "training 1", "training 3", "--tracer python")),
    *(f"specimens training --stress --threads 2 --diagnose-budget 30 {share}" for share in (1, 0)),
    *(f"specimens inference --stress --threads 2 --diagnose-budget 30 {share}" for share in (1, 0)),
    *(f"specimens inference {share}" for share in ("0", "1", "--diagnose-budget 0")),
    *("specimens batches", "tests/executors/test_ray.py", "tests/diagnosis/test_diagnosis.py", "tests/test_stress.py"),
    *("tests/integrations/test_dynamo_eager_runs.py", "tests/test_cli.py", "tests/test_nightly_cli.py"),
    *("tests/test_compiled.py", "tests/test_batch_invariance.py", "tests/test_extending.py", "tests/test_company.py"),
    "tests/integrations/test_dynamo_command.py",
    *("tests/native/test_parity.py", "tests/integrations/test_pytest_plugin.py", "tests/executors/test_local.py"),
    *("tests/tools/test_pipeline_specimens.py", "tests/repro/test_repro.py", "tests/tools/test_audit_invariance.py"),
    *("tests/fingerprint/test_verify_command.py", "tests/test_docs.py", "tests/cli/test_audit_command.py"),
    *("tests/native/test_build.py", "tests/test_gpu_benchmark.py", "tests/tools/test_pipeline_command.py"),
    *("tests/devices/test_triton_kernel.py", "tests/test_collectives.py"),
    *("tests/suites/test_torchvision.py", "tests/report/test_browser.py", "tests/diagnosis/test_freshrun.py"),
    *("tests/golden/test_golden.py", "tests/tools/test_observer_docs.py", "tests/fingerprint/test_sweep_changes.py"),
    *("tests/replay/test_capture.py", "tests/tools/test_numeric_values.py", "tests/replay/test_replay.py"),
)
"""The groups and files that take longest, in this order: on two cores the rest then fills what they leave."""
