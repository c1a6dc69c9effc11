"""A stock SGLang server on CPUs, for as long as standard input is open.

    python sglang_server.py '{"python": PATH, "folder": PATH, "nbytes": B}'

Writes a Qwen3 of that size into the folder, starts the server of that environment on it, and says
{"url": URL} when it listens.
"""

# `asked` first: it puts the folder of the benchmarks on the path.
from asked import answer, work  # isort: split

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
from dcs.appliers import checkpoint
from payload import LAYERS, Payload

LIBCUDA = """
int cuInit(unsigned flags) { return 100; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer) { return 100; }
"""
"""SGLang's kernels load libcuda even where they will not use it; this one says that there is no device."""
END_SECONDS = 30.0


def main() -> None:
    words = work()
    folder = Path(words["folder"])
    write_model(folder, Payload(words["nbytes"]))
    libcuda = folder / "libcuda.so.1"
    (folder / "libcuda.c").write_text(LIBCUDA)
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *flags, "-o", str(libcuda), str(folder / "libcuda.c")], check=True, timeout=60)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = start(words["python"], folder, port)
    try:
        await_line(process, "Uvicorn running on")
        answer({}, {"url": f"http://127.0.0.1:{port}"})
    finally:
        end(process)


def write_model(folder: Path, payload: Payload) -> None:
    """A Qwen3 in Hugging Face layout, with these weights."""
    embedding = payload.tensors["model.embed_tokens.weight"]
    gate = payload.tensors["model.layers.0.mlp.gate_proj.weight"]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": embedding.shape[1],
        "intermediate_size": gate.shape[0],
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": embedding.shape[1] // 20,
        "vocab_size": embedding.shape[0],
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint.write(folder / "model.safetensors", payload.tensors)


def start(python: str, folder: Path, port: int) -> "subprocess.Popen[str]":
    """Start the server in a session of its own, as it renames its processes."""
    command = [
        *(python, "-m", "sglang.launch_server", "--model-path", str(folder), "--skip-tokenizer-init"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--skip-server-warmup"),
        *("--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "8192"),
        *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    ]
    environment = {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        cwd=folder,  # `-m` puts the working folder on the path, and there might be a queue.py
        start_new_session=True,
    )


def await_line(process: "subprocess.Popen[str]", words: str) -> None:
    """Wait for such a line of output; what comes after it goes to standard error, as all did before."""
    assert process.stdout is not None
    for line in process.stdout:
        sys.stderr.write(line)
        if words in line:
            return
    raise RuntimeError(f"the server ended with {process.wait(END_SECONDS)} before it said {words!r}")


def end(process: "subprocess.Popen[str]") -> None:
    """End the server and its children."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for one in [psutil.Process(process.pid), *children] if process.poll() is None else children:
        one.send_signal(signal.SIGKILL)
    psutil.wait_procs(children, timeout=END_SECONDS)
    process.wait(END_SECONDS)


if __name__ == "__main__":
    main()
