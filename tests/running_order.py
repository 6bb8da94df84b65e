"""In which order the workers of xdist begin the tests that take longest."""

from __future__ import annotations

LONGEST_FIRST = (
    # Looks at all modules: 20 times as long once transformers and timm are loaded.
    "tests/core/diagnose/replay/controls/test_generators.py",
    *("compiled inference", "compiled training", "compiled inference again", "compiled triton"),
    # A pool of gloo ranks each, whose processes have loaded torch.
    *("ranks 0", "ranks 1"),
    # One behind the other in each worker: they share what their diagnoses start.
    *(f"specimens {share}" for share in ("training 0", "training 2", "training 1", "training 3", "--tracer python")),
    *(f"specimens training --stress --threads 2 --diagnose-budget 30 {share}" for share in (1, 0)),
    *(f"specimens inference --stress --threads 2 --diagnose-budget 30 {share}" for share in (1, 0)),
    *(f"specimens inference {share}" for share in ("0", "1", "--diagnose-budget 0")),
    *(
        "specimens batches",
        "tests/extensions/ray/test_executor.py",
        "tests/integrations/dynamo/test_fresh.py",
        "tests/core/diagnose/test_driver.py",
        "tests/integrations/dynamo/test_hook.py",
        "tests/extensions/stress/test_stage.py",
    ),
    # Start ranks, or run a training loop several times, in processes that import torch.
    *(
        "tests/extensions/ranks/test_cli_programs.py",
        "tests/extensions/watch/test_rerun.py",
        "tests/extensions/debugmode/test_trainers.py",
    ),
    # Compile with a cache that is empty where nothing was compiled before.
    *("inductor", "tests/extensions/compiled/test_check.py", "tests/integrations/pytest/test_compiled.py"),
    *(
        "tests/integrations/dynamo/test_eager_runs.py",
        "tests/extensions/ranks/test_commands.py",
        "tests/extensions/report/test_cli.py",
    ),
    *(
        "tests/core/trace/test_compiled.py",
        "tests/extensions/invariance/test_check.py",
        "tests/test_extending.py",
        "tests/extensions/invariance/test_variants.py",
    ),
    *("tests/integrations/dynamo/test_session.py", "tests/integrations/dynamo/test_compiled_runs.py"),
    *(
        "tests/core/trace/native/test_parity.py",
        "tests/integrations/pytest/test_plugin.py",
        "tests/core/sweep/executors/test_local.py",
    ),
    *(
        "tests/tools/pipeline/test_specimens.py",
        "tests/core/diagnose/repro/test_repro.py",
        "tests/tools/audit/test_invariance.py",
    ),
    *("tests/extensions/fingerprint/test_verify.py", "tests/test_docs.py", "tests/tools/audit/test_command.py"),
    *("tests/core/native/test_build.py", "tests/benchmarks/test_gpu.py", "tests/tools/pipeline/test_running.py"),
    *("tests/core/devices/test_triton_kernel.py", "tests/core/trace/test_collectives.py"),
    *(
        "tests/core/suites/test_torchvision.py",
        "tests/extensions/report/test_browser.py",
        "tests/core/diagnose/test_fresh_process.py",
    ),
    *(
        "tests/golden/test_golden.py",
        "tests/tools/observer/test_docs.py",
        "tests/extensions/fingerprint/test_after_sweep.py",
    ),
    *(
        "tests/core/diagnose/calls/test_capture.py",
        "tests/tools/numeric/test_compare.py",
        "tests/core/diagnose/replay/test_replayer.py",
    ),
)
"""The groups and files that take longest, in this order: on two cores the rest then fills what they leave."""
