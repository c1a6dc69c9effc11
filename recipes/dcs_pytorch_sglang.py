"""A plain PyTorch trainer, and a SGLang server that has its weights after every step.

    python -m sglang.launch_server --model-path MODEL --dtype float32 --port 30000
    python recipes/dcs_pytorch_sglang.py MODEL http://127.0.0.1:30000

Here all parts of dcs run in one process. Across machines `dcs serve` runs anywhere, the publisher in the
trainer, and an applier with its subscriber beside each server, under a name of its own.
"""

import json
import sys
import urllib.request

import dcs
import torch
from dcs.appliers import SglangApplier
from transformers import AutoModelForCausalLM

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]


def main(folder: str, url: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        dcs.Coordinator() as coordinator,
        dcs.Publisher(coordinator.address, run="demo", layout=dcs.layout.of(model)) as publisher,
        SglangApplier(url, model=folder) as applier,
        dcs.Subscriber(coordinator.address, run="demo", name="sglang-0", layout=applier.layout) as subscriber,
    ):
        follower = subscriber.follow(applier)
        for step in (1, 2, 3):
            ids = torch.tensor([PROMPT])
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            publisher.publish(step, model.state_dict())  # returns when frozen; the next step may begin
            follower.wait_for(step, timeout=120.0)
            print(f"version {step}: log probabilities agree within {disagreement(model, url):.1e}")


def disagreement(model: torch.nn.Module, url: str) -> float:
    """The largest difference between the server's log probabilities of what it samples and the trainer's."""
    body = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": {"max_new_tokens": 8}}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.load(reply)
    sampled, said = answer["output_ids"], answer["meta_info"]["output_token_logprobs"]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + sampled])).logits[0, len(PROMPT) - 1 : -1]
    mine = torch.log_softmax(logits, -1)[range(len(sampled)), sampled]
    return max(abs(a - b[0]) for a, b in zip(mine.tolist(), said, strict=True))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
