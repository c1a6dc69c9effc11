"""Settings of SGLang: what is refused before anything starts, and the command line they come to."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
from relax.backends.inference.base import EngineSpec
from relax.backends.inference.errors import EngineError
from relax.backends.inference.sglang.flags import command, environment
from relax.backends.inference.sglang.installed import explain, installed_version
from relax.config import ConfigError, check
from relax.config.roles import RolloutSettings
from relax.config.sglang import SglangSettings

ON_GPUS = {"device": "cuda", "tensor_parallel": 2, "python": "py"}


def spec(name: str = "engine-0", routes: bool = False, **sglang: object) -> EngineSpec:
    settings = RolloutSettings(engine="sglang", sglang=SglangSettings.model_validate(sglang))
    return EngineSpec(name, Path("model"), settings=settings, routes=routes, seed=5, max_running=7)


def flags(made: EngineSpec, capacity: int = 100) -> str:
    return " ".join(command(made, Path("model"), 4321, capacity))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollout.sglang.urls=[http://a:1]"], "names 1 servers with rollout.replicas = 2"),
        (["rollout.sglang.expert_parallel=2"], "expert_parallel = 2 does not divide"),
        (["rollout.sglang.data_parallel=2"], "takes weights from files only"),
        (["rollout.sglang.pipeline_parallel=2", "rollout.sglang.weights=tensor"], "pipeline_parallel = 2"),
        (["mode=colocate", "rollout.sglang.pause=in_place"], "not on-policy"),
        (["actor.routing_replay=true", "rollout.sglang.pause=retract"], "keeps those of the first sampling"),
    ],
)
def test_combinations_that_cannot_work_are_refused(config, words, message):
    with pytest.raises(ConfigError, match=message):
        check(config("rollout.engine=sglang", "data.answer_column=answer", *words))
    check(config("data.answer_column=answer", *[word for word in words if "routing" not in word]))


def test_a_run_waits_for_its_roles_as_long_as_for_a_server(config):
    server = ["rollout.engine=sglang", "rollout.sglang.start_seconds=900", "ray.start_seconds=300"]
    assert config(*server).start_seconds > 900
    assert config(*server, "ray.start_seconds=1200").start_seconds == 1200
    assert config(*server[1:]).start_seconds == 300
    there = "rollout.sglang.urls=[http://a:1,http://a:2]"
    assert config(*server, there).start_seconds == 300


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rollout.sglang.extra={tp_size: 2}", "use rollout.sglang.tensor_parallel"),
        ("rollout.sglang.extra={--port: 2}", "'--port' is no flag"),
        ("rollout.sglang.extra={dtype: half}", "use model.dtype"),
        ("rollout.sglang.urls=[10.0.0.1]", "'10.0.0.1' is no address of a server"),
        ("rollout.sglang.urls=[http://a:1,http://a:1]", "named twice"),
        ("rollout.sglang.tensor_paralel=2", "did you mean rollout.sglang.tensor_parallel"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(config, word, message):
    with pytest.raises(ConfigError, match=message):
        config(word)


def test_replicas_have_gpus_seeds_and_contexts_of_their_own():
    first, second = flags(spec("engine-0", **ON_GPUS)), flags(spec("engine-1", first_gpu=4, **ON_GPUS))
    assert "py -m sglang.launch_server --model-path model --host 127.0.0.1 --port 4321" in first
    assert "--tp-size 2 --ep-size 1 --dp-size 1 --pp-size 1" in first
    assert "--base-gpu-id 0" in first
    assert "--base-gpu-id 6" in second
    assert "--context-length 108 " in first  # SGLang keeps some for itself
    assert "--max-running-requests 7" in first
    assert first.split("--random-seed ")[1].split()[0] != second.split("--random-seed ")[1].split()[0]
    assert "routed-experts" not in first
    assert "--device" not in first


def test_the_gpus_that_a_launcher_gave_to_one_engine_are_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert "--base-gpu-id 0" in flags(spec("engine-3", **ON_GPUS))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    assert "--base-gpu-id 6" in flags(spec("engine-3", **ON_GPUS))


def test_data_parallel_ranks_have_gpus_of_their_own_unless_they_share_attention():
    apart = {**ON_GPUS, "data_parallel": 2, "weights": "disk"}
    assert "--base-gpu-id 4" in flags(spec("engine-1", **apart))
    assert "--base-gpu-id 2" in flags(spec("engine-1", **apart, extra={"enable_dp_attention": True}))


def test_further_flags_are_written_as_the_server_reads_them():
    extra = {"chunked-prefill-size": 4096, "trust_remote_code": True, "lora_paths": ["a", "b"], "x": False}
    line = flags(spec(routes=True, deterministic=True, device="cpu", extra=extra))
    assert "--chunked-prefill-size 4096 --trust-remote-code --lora-paths a b" in line
    assert "--x" not in line
    assert "--enable-return-routed-experts --enable-deterministic-inference" in line
    assert "--attention-backend torch_native --device cpu" in line


def test_the_cache_on_cpus_is_bounded_by_what_can_run_unless_it_is_given():
    cache = "--max-total-tokens "
    assert flags(spec(device="cpu")).split(cache)[1].split()[0] == str(7 * 116)
    assert flags(spec(device="cpu"), capacity=40_960).split(cache)[1].split()[0] == "131072"
    assert flags(spec(device="cpu"), capacity=262_144).split(cache)[1].split()[0] == str(262_144 + 16)
    assert flags(spec(device="cpu", cache_tokens=512)).split(cache)[1].split()[0] == "512"
    assert cache not in flags(spec(device="cpu", memory_fraction=0.2))
    assert cache not in flags(spec(**ON_GPUS))


def test_a_server_has_the_environment_around_it_and_its_own():
    made = spec(device="cpu", env={"OMP_NUM_THREADS": "3", "X": "1"})
    found = environment(made, {"PATH": "p", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "9"})
    assert found["PATH"] == "p"
    assert (found["OMP_NUM_THREADS"], found["X"], found["SGLANG_USE_CPU_ENGINE"]) == ("3", "1", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in found
    assert "SGLANG_USE_CPU_ENGINE" not in environment(spec(**ON_GPUS), {})


def test_a_python_of_its_own_does_not_look_where_this_one_does():
    around = {"PATH": "p", "PYTHONPATH": "megatron", "PYTHONHOME": "h"}
    assert environment(spec(device="cpu"), around)["PYTHONPATH"] == "megatron"
    assert "PYTHONHOME" not in environment(spec(python="py"), around)
    assert "PYTHONPATH" not in environment(spec(python="py"), around)
    named = spec(python="py", env={"PYTHONPATH": "plugin"})
    assert environment(named, around)["PYTHONPATH"] == "plugin"


def test_pictures_are_not_resized_again():
    assert "mm-process-config" not in flags(spec())
    (*_, said) = command(spec(device="cuda"), Path("m"), 1, 100, pictures=True)[:-2]
    assert said == '{"image": {"do_resize": false}}'


def test_a_python_without_sglang_is_named_with_the_way_out(tmp_path):
    with pytest.raises(EngineError, match=r"no-python' cannot be run.*set rollout.sglang.python"):
        installed_version(SglangSettings(python=str(tmp_path / "no-python")))
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(EngineError, match=r"has no SGLang \(.*no module named sglang.*rollout.sglang.urls"):
        installed_version(SglangSettings(python=str(bare)))


def test_what_would_serve_is_told(tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise RuntimeError('imported')")
    described = tmp_path / "sglang-0.5.22.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.22\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    settings = spec(python=str(python), device="cuda", tensor_parallel=4).settings
    assert explain(settings) == (
        "SGLang 0.5.22 (written for and tested with 0.5.23), 2 servers on GPUs 0 to 7, 4 each; weights by "
        "distributed, requests meanwhile: auto; draws differ from run to run (rollout.sglang.deterministic)"
    )
    there = RolloutSettings(sglang=SglangSettings(urls=["http://a:1", "http://b:1"]))
    assert explain(there).startswith("2 servers at http://a:1, http://b:1;")


@pytest.mark.parametrize("way_out", ["none", "built for CPUs", "a stand-in", "a GPU"])
def test_kernels_that_need_a_missing_libcuda_are_found_before_a_server_is_started(way_out, tmp_path):
    for name in ("sglang", "sglang-0.5.23.dist-info", "sgl_kernel/sm90"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("")
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "sglang-0.5.23.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.23\n")
    needed = b"libc.so.6" if way_out == "built for CPUs" else b"libcuda.so.1"
    (tmp_path / "sgl_kernel" / "sm90" / "common_ops.abi3.so").write_bytes(b"ELF" + needed)
    there = tmp_path / "libraries"
    there.mkdir()
    if way_out == "a stand-in":
        library = importlib.util.find_spec("msgspec._core")  # any one that can be loaded
        assert library is not None
        assert library.origin is not None
        shutil.copy(library.origin, there / "libcuda.so.1")
    settings = SglangSettings(
        python=sys.executable,
        device="cuda" if way_out == "a GPU" else "cpu",
        env={"PYTHONPATH": str(tmp_path), "LD_LIBRARY_PATH": str(there)},
    )
    if way_out == "none":
        with pytest.raises(EngineError, match=r"libcuda.so.1: cannot open.*rollout.sglang.env=.*On a CPU"):
            installed_version(settings)
    else:
        assert installed_version(settings) == "0.5.23"
