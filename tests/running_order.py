"""In which order the workers of xdist begin the tests that take longest."""

from __future__ import annotations

LONGEST_FIRST = (
    # Looks at all modules: 20 times as long once transformers and timm are loaded.
    "tests/replay/controls/test_generators.py",
    *("compiled inference", "compiled training", "compiled inference again"),
    # A pool of gloo ranks each, whose processes have loaded torch.
    *("ranks 0", "ranks 1"),
    # One behind the other in each worker: they share what their diagnoses start.
    *(f"specimens {share}" for share in ("training 0", "training 2", "training 1", "training 3", "--tracer python")),
    *(f"specimens training --stress --threads 2 --diagnose-budget 30 {share}" for share in (1, 0)),
    *(f"specimens inference --stress --threads 2 --diagnose-budget 30 {share}" for share in (1, 0)),
    *(f"specimens inference {share}" for share in ("0", "1", "--diagnose-budget 0")),
    *(
        "specimens batches",
        "tests/sweep/executors/test_ray.py",
        "tests/integrations/dynamo/test_fresh.py",
        "tests/diagnose/test_driver.py",
        "tests/integrations/dynamo/test_hook.py",
        "tests/check/test_stress.py",
    ),
    # Start ranks, or run a training loop several times, in processes that import torch.
    *("tests/cli/test_ranks_programs.py", "tests/training/test_rerun.py", "tests/integrations/test_trainers.py"),
    # Compile with a cache that is empty where nothing was compiled before.
    *("inductor", "tests/check/test_compiled.py", "tests/integrations/pytest/test_compiled.py"),
    *("tests/integrations/dynamo/test_eager_runs.py", "tests/cli/test_commands.py", "tests/cli/test_report.py"),
    *(
        "tests/trace/test_compiled.py",
        "tests/check/test_invariance.py",
        "tests/test_extending.py",
        "tests/check/test_variants.py",
    ),
    *("tests/integrations/dynamo/test_session.py", "tests/integrations/dynamo/test_compiled_runs.py"),
    *(
        "tests/trace/native/test_parity.py",
        "tests/integrations/pytest/test_plugin.py",
        "tests/sweep/executors/test_local.py",
    ),
    *("tests/tools/pipeline/test_specimens.py", "tests/repro/test_repro.py", "tests/tools/audit/test_invariance.py"),
    *("tests/fingerprint/test_verify.py", "tests/test_docs.py", "tests/tools/audit/test_command.py"),
    *("tests/native/test_build.py", "tests/benchmarks/test_gpu.py", "tests/tools/pipeline/test_running.py"),
    *("tests/devices/test_triton_kernel.py", "tests/trace/test_collectives.py"),
    *("tests/suites/test_torchvision.py", "tests/report/test_browser.py", "tests/diagnose/test_fresh_process.py"),
    *("tests/golden/test_golden.py", "tests/tools/observer/test_docs.py", "tests/sweep/test_fingerprints.py"),
    *("tests/calls/test_capture.py", "tests/tools/numeric/test_compare.py", "tests/replay/test_replayer.py"),
)
"""The groups and files that take longest, in this order: on two cores the rest then fills what they leave."""
