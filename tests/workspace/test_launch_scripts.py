"""The launch scripts: clean shell, the words they say, and clusters that fit or are refused by name."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent
"""Where the linters were installed beside the Python of the tests."""
SCRIPTS = sorted(ROOT.glob("scripts/**/*.sh"))
ENTRYPOINTS = ("local", "ray-job", "spmd-multinode")
TRAINING = {
    "text/run-qwen3-4B-8xgpu": "8 of 8 GPUs",
    "text/run-qwen3-30B-A3B-16xgpu": "16 of 16 GPUs",
    "multimodal/run-qwen3-vl-4B-8xgpu": "8 of 8 GPUs",
    "multimodal/run-qwen3-30B-A3B-omni-16xgpu": "16 of 16 GPUs",
}


def run(script: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / f"{script}.sh"), *words],
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A command that writes the words it is called with, a line each."""
    path = tmp_path_factory.mktemp("stub") / "command"
    path.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def doctor() -> Callable[..., Result]:
    """`relax doctor`, in this process."""
    from relax.entrypoints.cli import app

    def call(*words: str) -> Result:
        return CliRunner().invoke(app, ["doctor", *words])

    return call


def plain(text: str) -> str:
    """A message without the line breaks of a narrow terminal."""
    return re.sub(r"\s+", " ", text)


def test_the_shell_is_clean():
    done = subprocess.run([TOOLS / "shellcheck", *SCRIPTS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_linter_of_shell_finds_what_it_is_for(tmp_path):
    bad = tmp_path / "bad.sh"
    bad.write_text("#!/usr/bin/env bash\nrm -rf $EXP_DIR/runs\n")
    assert subprocess.run([TOOLS / "shellcheck", bad], capture_output=True, timeout=60).returncode == 1


def test_the_recipe_of_the_image_is_clean_and_has_the_cuda_of_the_pinned_torch(neutral_lock):
    recipe = ROOT / "docker/Dockerfile"
    command = [TOOLS / "hadolint", "--no-color", recipe]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    base = re.search(r"^FROM nvidia/cuda:(\d+\.\d+)\.", recipe.read_text(), flags=re.M)
    toolkit = re.search(r'name = "cuda-toolkit"\nversion = "(\d+\.\d+)\.', neutral_lock)
    assert base is not None
    assert toolkit is not None
    assert base[1] == toolkit[1]


@pytest.mark.parametrize("script", [f"entrypoint/{name}" for name in ENTRYPOINTS])
def test_an_entrypoint_says_how_it_is_used(script):
    done = run(script, "--help")
    assert done.returncode == 0
    assert "usage: scripts/" in done.stdout
    assert run(script).returncode == 64
    assert "no option --nothing" in run(script, "--nothing").stderr


@pytest.mark.parametrize("script", TRAINING)
def test_a_training_script_is_strict_and_says_how_it_is_used(script):
    assert "set -euo pipefail" in (ROOT / f"scripts/training/{script}.sh").read_text()
    done = run(f"training/{script}", "--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("EXP_DIR", "MODEL", "DATA", "RUNS", "CLUSTER", "--dry-run"))
    refused = run(f"training/{script}", "--dri-run")
    assert refused.returncode == 64
    assert "--dri-run is neither an option nor key=value" in refused.stderr


@pytest.mark.parametrize("script", TRAINING)
def test_a_training_script_resolves_on_the_cluster_it_is_named_for(script, stub, doctor):
    done = run(f"training/{script}", "--dry-run", EXP_DIR="/exp", RELAX=stub)
    command, *words = done.stdout.splitlines()
    assert command == "doctor", done.stderr
    assert "run.root=/exp/runs" in words
    found = doctor(*words)
    assert found.exit_code == 0, found.output
    assert f"on {TRAINING[script]}: resolves" in plain(found.output)
    # Nothing of the model is on this machine but its sizes.
    assert "is not on this machine; its sizes are those of" in plain(found.output)


def test_every_path_can_be_given_and_words_go_last(stub):
    done = run(
        "training/text/run-qwen3-4B-8xgpu",
        "actor.lr=2e-6",
        "run.name=a b",
        MODEL="/m/x y",
        DATA="/d",
        RUNS="/r",
        CONFIG="/c.yaml",
        RELAX=stub,
    )
    assert done.stdout.splitlines() == [
        "train",
        "/c.yaml",
        "model.path=/m/x y",
        "data.path=/d",
        "run.root=/r",
        "actor.lr=2e-6",
        "run.name=a b",
        "ray.address=null",
    ]


def test_an_entrypoint_that_there_is_not_is_refused(stub):
    done = run("training/text/run-qwen3-4B-8xgpu", ENTRYPOINT="slurm", RELAX=stub)
    assert done.returncode == 64
    assert "ENTRYPOINT = slurm is none of local, ray-job, spmd-multinode" in done.stderr


def test_a_ray_that_is_not_there_is_said_in_a_line(stub):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"http://127.0.0.1:{held.getsockname()[1]}"
        done = run("entrypoint/ray-job", "configs/quickstart.yaml", RAY=stub, RAY_ADDRESS=address)
    assert done.returncode == 69
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"ray-job.sh: no Ray answers at {address} (Connection refused); start one")


ODD = {
    "a command that there is not": (
        "local",
        {"RELAX": "/no/such"},
        "there is no command /no/such; install it",
    ),
    "no command at all": ("local", {"PATH": "/usr/bin:/bin", "RELAX": "relax-nowhere"}, "or name it: RELAX="),
    "a ray that there is not": ("ray-job", {"RAY": "/no/such"}, "or name it: RAY=COMMAND"),
    "a rank that is a word": ("spmd-multinode", {"NODE_RANK": "x"}, "NODE_RANK = x is no number from 0 to 1"),
    "a rank beyond the nodes": (
        "spmd-multinode",
        {"NODE_RANK": "2"},
        "NODE_RANK = 2 is no number from 0 to 1",
    ),
    "nodes that are a word": ("spmd-multinode", {"NNODES": "two"}, "NNODES = two is no number from 1"),
    "a port beyond all": (
        "spmd-multinode",
        {"MASTER_PORT": "99999"},
        "MASTER_PORT = 99999 is no number from 1 to",
    ),
    "a time that is a word": ("spmd-multinode", {"JOIN_SECONDS": "1 h"}, "JOIN_SECONDS = 1 h is no number"),
    "an address of no dashboard": (
        "ray-job",
        {"RAY_ADDRESS": "10.0.0.1:6379"},
        "looks like http://HEAD:8265",
    ),
    "a port that is a word": ("ray-job", {"RAY_ADDRESS": "http://head:x"}, "is no address of a dashboard"),
    "a variable that is not set": (
        "ray-job",
        {"JOB_ENV": "NOWHERE"},
        "JOB_ENV names NOWHERE, which is not set",
    ),
}


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_environment_is_refused_in_a_line(odd, stub):
    name, environment, message = ODD[odd]
    given = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "RELAX": stub, "RAY": stub} | environment
    done = run(f"entrypoint/{name}", "c.yaml", **given)
    assert done.returncode in (64, 69)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{name}.sh: ")
    assert message in line


def test_scripts_work_from_folders_with_spaces_and_through_links(stub, tmp_path):
    there = tmp_path / "a checkout"
    shutil.copytree(ROOT / "scripts", there / "scripts")
    link = tmp_path / "train"
    link.symlink_to(there / "scripts/training/text/run-qwen3-4B-8xgpu.sh")
    done = subprocess.run(
        [link],
        env={"PATH": os.environ["PATH"], "RELAX": stub, "EXP_DIR": "/my data"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "train",
        f"{there}/configs/qwen3-4B-8xgpu.yaml",
        "model.path=/my data/models/Qwen3-4B",
        "data.path=/my data/data/dapo-math-17k/dapo-math-17k.jsonl",
        "run.root=/my data/runs",
        "ray.address=null",
    ]


def test_a_ray_job_is_submitted_with_its_words_quoted(stub):
    head = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{head.getsockname()[1]}"
    done = run(
        "entrypoint/ray-job",
        "configs/quickstart.yaml",
        "run.name=a b",
        RAY=stub,
        RAY_ADDRESS=address,
        JOB_ID="mine",
        JOB_ENV="HF_HOME",
        HF_HOME="/hub",
        WORKDIR="/opt/re lax",
    )
    head.close()
    assert done.stdout.splitlines() == [
        "job",
        "submit",
        "--address",
        address,
        "--submission-id",
        "mine",
        "--runtime-env-json",
        '{"env_vars": {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": "120", '
        '"HF_HOME": "/hub"}}',
        "--",
        "bash",
        "-c",
        r"cd /opt/re\ lax && exec relax train configs/quickstart.yaml run.name=a\ b ray.address=auto",
    ]


@pytest.mark.parametrize("name", ENTRYPOINTS)
def test_an_entrypoint_checks_instead_of_running_when_asked(name, stub):
    for words, environment in ((["--dry-run"], {}), ([], {"RELAX_DOCTOR": "1"})):
        done = run(f"entrypoint/{name}", "c.yaml", *words, RELAX=stub, CLUSTER="/k.yaml", **environment)
        address = "null" if name == "local" else "auto"
        assert done.stdout.splitlines() == [
            "doctor",
            "c.yaml",
            f"ray.address={address}",
            "--cluster",
            "/k.yaml",
        ]


def test_many_nodes_without_a_first_one_are_refused(stub):
    done = run("entrypoint/spmd-multinode", "c.yaml", NNODES="2", NODE_RANK="1", RELAX=stub, RAY=stub)
    assert done.returncode == 64
    assert "MASTER_ADDR is not set" in done.stderr


def test_a_node_whose_first_one_does_not_come_gives_up(stub):
    done = run(
        "entrypoint/spmd-multinode",
        "c.yaml",
        NNODES="2",
        NODE_RANK="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
        JOIN_SECONDS="0",
        RELAX=stub,
        RAY=stub,
    )
    assert done.returncode == 69
    assert "rank 0 did not listen on 127.0.0.1:1 for 0 s" in done.stderr


WRONG = {
    "too few GPUs": (
        "qwen3-4B-8xgpu",
        "nodes: [{name: n, cpus: 96, gpus: 4, gpu_memory: 80GB, memory: 1TiB}]",
        [],
        "too few GPUs: the run reserves 8 (4 by actor, 4 by rollout), and the nodes have 4",
    ),
    "a tensor-parallel group wider than a node": (
        "qwen3-4B-8xgpu",
        "nodes: [{name: n, count: 6, cpus: 96, gpus: 2, gpu_memory: 80GB, memory: 1TiB}]",
        ["actor.tensor_parallel=4", "actor.data_parallel=1"],
        "actor.tensor_parallel = 4: a tensor-parallel group exchanges",
    ),
    "a server wider than a node": (
        "qwen3-30B-A3B-16xgpu",
        "nodes: [{name: n, count: 2, cpus: 96, gpus: 8, gpu_memory: 141GB, memory: 2TiB}]",
        ["rollout.replicas=1", "rollout.sglang.tensor_parallel=16"],
        "one server takes 16 GPUs of one node",
    ),
    "GPUs that are too small for the trainer": (
        "qwen3-30B-A3B-16xgpu",
        "nodes: [{name: n, count: 2, cpus: 160, gpus: 8, gpu_memory: 80GB, memory: 2TiB}]",
        [],
        "actor on n-0: a GPU would hold 72.8 GiB",
    ),
    "no room for one sequence": (
        "qwen3-4B-8xgpu",
        "nodes: [{name: n, cpus: 96, gpus: 8, gpu_memory: 80GB, memory: 1TiB}]",
        ["rollout.sglang.memory_fraction=0.11"],
        "one sequence may have 9,216; raise rollout.sglang.tensor_parallel",
    ),
    "a node with too little memory": (
        "qwen3-30B-A3B-16xgpu",
        "nodes: [{name: n, count: 2, cpus: 160, gpus: 8, gpu_memory: 141GB, memory: 128GiB}]",
        [],
        "n-1 has 128 GiB and would hold 227",
    ),
    "too few CPUs": (
        "qwen3-4B-8xgpu",
        "nodes: [{name: n, cpus: 9, gpus: 8, gpu_memory: 80GB, memory: 1TiB}]",
        [],
        "too few CPUs: the roles reserve 10.15",
    ),
    "taking turns on GPUs of a cluster": (
        "qwen3-4B-8xgpu",
        "nodes: [{name: n, cpus: 96, gpus: 8, gpu_memory: 80GB, memory: 1TiB}]",
        ["mode=colocate", "max_staleness=0"],
        "mode = colocate with actor.device = cuda and a ray.address",
    ),
    "stale samples in turns": (
        "qwen3-4B-8xgpu",
        "nodes: [{name: n, cpus: 96, gpus: 8, gpu_memory: 80GB, memory: 1TiB}]",
        ["mode=colocate", "max_staleness=1"],
        "max_staleness = 1 with mode = colocate",
    ),
    "a split that the model's heads do not allow": (
        "qwen3-30B-A3B-16xgpu",
        "nodes: [{name: n, count: 2, cpus: 160, gpus: 8, gpu_memory: 141GB, memory: 2TiB}]",
        ["actor.tensor_parallel=8", "actor.data_parallel=1"],
        "actor.tensor_parallel = 8 does not divide the model's num_key_value_heads of 4",
    ),
    "routes of a dense model": (
        "qwen3-4B-8xgpu",
        "nodes: [{name: n, cpus: 96, gpus: 8, gpu_memory: 80GB, memory: 1TiB}]",
        ["actor.routing_replay=true"],
        "a qwen3 is dense, so no token is routed",
    ),
    "a model of unknown size": (
        "qwen3-4B-8xgpu",
        "nodes: [{name: n, cpus: 96, gpus: 8, gpu_memory: 80GB, memory: 1TiB}]",
        ["model.path=models/Unheard-1B"],
        "model.path = 'models/Unheard-1B' is not on this machine",
    ),
    "a node without the memory of its GPUs": (
        "qwen3-4B-8xgpu",
        "nodes: [{name: n, cpus: 96, gpus: 8, memory: 1TiB}]",
        [],
        "node n has 8 GPUs and no gpu_memory",
    ),
    "a size without a unit": (
        "qwen3-4B-8xgpu",
        "nodes: [{name: n, cpus: 96, gpus: 8, gpu_memory: 24, memory: 1TiB}]",
        [],
        "nodes.0.gpu_memory = 24: 24 has no unit, and so few bytes no node has; write '24GiB'",
    ),
    "less than a node can have": (
        "qwen3-4B-8xgpu",
        "nodes: [{name: n, cpus: 96, gpus: 8, gpu_memory: 80GB, memory: 512MiB}]",
        [],
        "nodes.0.memory = '512MiB': '512MiB' is less than 1 GiB",
    ),
    "a key that there is not": (
        "qwen3-4B-8xgpu",
        "nodes: [{name: n, cpu: 96, gpus: 8, gpu_mem: 80GB, memory: 1TiB}]",
        [],
        "nodes.0.cpu = 96: there is no such key; did you mean cpus? nodes.0.gpu_mem = '80GB': there is no "
        "such key; did you mean gpu_memory?",
    ),
    "a key like none": (
        "qwen3-4B-8xgpu",
        "nodes: [{name: n, cpus: 96, memory: 1TiB, zzz: 1}]",
        [],
        "nodes.0.zzz = 1: there is no such key; the keys here are name, count, cpus, gpus, gpu_memory, mem",
    ),
    "more nodes than there are": (
        "qwen3-4B-8xgpu",
        "nodes: [{name: n, count: 4097, cpus: 96, gpus: 8, gpu_memory: 80GB, memory: 1TiB}]",
        [],
        "nodes.0.count = 4097: Input should be less than or equal to 4096",
    ),
    "more nodes together than there are": (
        "qwen3-4B-8xgpu",
        "nodes: [{name: a, count: 4000, cpus: 9, memory: 1TiB}, {name: b, count: 97, cpus: 9, memory: 1TiB}]",
        [],
        "4097 nodes together are more than 4096",
    ),
    "a name that is none": (
        "qwen3-4B-8xgpu",
        "nodes: [{name: '[/x]', cpus: 96, gpus: 8, gpu_memory: 80GB, memory: 1TiB}]",
        [],
        "nodes.0.name = '[/x]': letters, digits, dots, dashes, colons and underscores are expected",
    ),
    "a size beyond all": (
        "qwen3-4B-8xgpu",
        f"nodes: [{{name: n, cpus: 96, gpus: 8, gpu_memory: 80GB, memory: {'9' * 400}TiB}}]",
        [],
        f"nodes.0.memory = '{'9' * 59}...: no node has so much",
    ),
    "lists in lists": ("qwen3-4B-8xgpu", "nodes: " + "[" * 700 + "]" * 700, [], "its lists are too deep"),
    "a node that is a word": (
        "qwen3-4B-8xgpu",
        "nodes: [eight]",
        [],
        "nodes.0 = 'eight': keys and values are expected",
    ),
    "a file that describes nothing": (
        "qwen3-4B-8xgpu",
        "node: 8",
        [],
        "it does not describe a cluster",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_by_name(wrong, doctor, tmp_path):
    config, cluster, words, message = WRONG[wrong]
    described = tmp_path / "cluster.yaml"
    described.write_text(cluster)
    found = doctor(str(ROOT / f"configs/{config}.yaml"), *words, "--cluster", str(described))
    assert found.exit_code == 2, found.output
    assert message in plain(found.output)
    assert "resolves" not in found.output


def test_a_thinker_that_only_reads_is_placed_as_one_that_hears(doctor, tmp_path):
    described = tmp_path / "cluster.yaml"
    described.write_text("nodes: [{name: n, count: 2, cpus: 160, gpus: 8, gpu_memory: 141GB, memory: 2TiB}]")
    config = str(ROOT / "configs/qwen3-30B-A3B-omni-16xgpu.yaml")
    words = ("model.text_only=true", "data.audio_column=null", "data.video_column=null")
    found = doctor(config, *words, "--cluster", str(described))
    assert found.exit_code == 0, found.output
    assert "16 of 16 GPUs" in plain(found.output)
