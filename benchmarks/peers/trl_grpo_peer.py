"""TRL's GRPOTrainer on the work of `trl_grpo.py`, in blocks of steps that its parent asks for.

    python trl_grpo_peer.py '{"model": FOLDER, "data": JSONL, "prompts": 8, "completions": 8, ...}'

Each line on standard input, {"steps": 10, "threads": 2, "seconds": 20}, is one block, answered by one line
on standard output: {"walls": [...], "cpus": [...], "rewards": [...], "tokens": [...]}, seconds a step, mean
rewards and trained tokens; a block ends early when its seconds are over. Between blocks the process sleeps,
so that the other side can be measured in turn. Closing standard input ends it.

What TRL is given for its best: float32 without gradient checkpointing, which would recompute the forward; no
logging, saving or reporting; the fused AdamW; one optimizer step a generation, so that it skips the pass for
old logprobs. To train as many tokens as the other side, no completion ends early: generation gets no end
token, and the trainer knows none to mask after.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]

NO_TOKEN = -1


class Blocks(TrainerCallback):
    """Times every step, and waits at the end of a block for the next."""

    def __init__(self, answers: Any, totals: "Totals") -> None:
        self._answers = answers
        self._totals = totals
        self._left = 0
        self._deadline = 0.0
        self._measured: dict[str, list[float]] = {}
        self._at = (0.0, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._next_block(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = _clocks()
        self._measured["walls"].append(now[0] - self._at[0])
        self._measured["cpus"].append(now[1] - self._at[1])
        reward, tokens = self._totals.take()
        self._measured["rewards"].append(reward)
        self._measured["tokens"].append(tokens)
        self._left -= 1
        if self._left == 0 or now[0] > self._deadline:
            print(json.dumps(self._measured), file=self._answers, flush=True)
            self._next_block(control)
        self._at = _clocks()

    def _next_block(self, control: Any) -> None:
        line = sys.stdin.readline()
        if not line:
            control.should_training_stop = True
            return
        asked = json.loads(line)
        torch.set_num_threads(asked["threads"])
        self._left = asked["steps"]
        self._deadline = time.perf_counter() + asked["seconds"]
        self._measured = {"walls": [], "cpus": [], "rewards": [], "tokens": []}
        self._at = _clocks()


class Totals:
    """The reward function, which also counts: the share of one character in each completion."""

    __name__ = "char_share"

    def __init__(self, character: str, length: int) -> None:
        self._character = character
        self._length = length
        self._rewards: list[float] = []
        self._tokens = 0

    def __call__(self, completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        rewards = [text.count(self._character) / max(len(text), self._length) for text in texts]
        self._rewards += rewards
        self._tokens += sum(len(ids) for ids in completion_ids)
        return rewards

    def take(self) -> tuple[float, int]:
        """Mean reward and tokens since the last call."""
        mean, tokens = sum(self._rewards) / len(self._rewards), self._tokens
        self._rewards, self._tokens = [], 0
        return mean, tokens


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def main() -> None:
    work = json.loads(sys.argv[1])
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    rows = [json.loads(line) for line in Path(work["data"]).read_text().splitlines()]
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows])
    samples = work["prompts"] * work["completions"]
    settings = GRPOConfig(
        output_dir=work["scratch"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=1,
        num_generations=work["completions"],
        max_completion_length=work["tokens"],
        generation_kwargs={"eos_token_id": None},
        learning_rate=work["lr"],
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        temperature=1.0,
        max_steps=1_000_000,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=work["seed"],
    )
    totals = Totals(work["character"], work["tokens"])
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=totals,  # pyright: ignore[reportArgumentType]
        args=settings,
        train_dataset=data,
        callbacks=[Blocks(answers, totals)],
    )
    trainer.eos_token_ids = [NO_TOKEN]
    print(json.dumps({"ready": True}), file=answers, flush=True)
    trainer.train()


if __name__ == "__main__":
    main()
