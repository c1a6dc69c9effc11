"""A GRPO step as verl's trainer drives it, by the calls of the PyPI package transferqueue: run this file.

One controller process hands *metadata* to the workers of each stage; the data itself goes between the workers
and the store. Only the import differs from a program for that package.
"""

import torch
import transferqueue.compat.transfer_queue as tq  # was: import transfer_queue as tq
from tensordict import TensorDict

PARTITION = "train"
PROMPTS, SAMPLES = 4, 4  # answers to a prompt


def rollout(batch: tq.KVBatchMeta) -> None:
    """A rollout worker: reads prompts by metadata, writes ragged answers and their log-probabilities."""
    found = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=["prompt"])
    prompts = found["prompt"]
    answers = [torch.randint(0, 100, (3 + row % 5,)) for row in range(len(prompts))]
    fields = TensorDict(
        {
            "answer": torch.nested.as_nested_tensor(answers, layout=torch.jagged),
            "logprob": torch.nested.as_nested_tensor(
                [-torch.rand(len(a)) for a in answers], layout=torch.jagged
            ),
            "reward": torch.tensor([float((a % 2 == 0).float().mean()) for a in answers]),
        },
        batch_size=[len(answers)],
    )
    tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=fields)


def advantages(batch: tq.KVBatchMeta) -> None:
    """The controller itself: group-relative advantages, from the rewards alone."""
    reward = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=["reward"])["reward"]
    groups = reward.view(PROMPTS, SAMPLES)
    value = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    fields = TensorDict({"advantage": value.flatten()}, batch_size=[len(batch.keys)])
    tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=fields)


def train(batch: tq.KVBatchMeta, rank: int) -> tuple[int, float]:
    """A training worker: reads its part of the batch, answers and advantages; returns tokens and loss."""
    data = tq.kv_batch_get(
        keys=batch.keys, partition_id=PARTITION, select_fields=["answer", "logprob", "advantage"]
    )
    rows = zip(data["logprob"].unbind(), data["advantage"], strict=True)
    loss = sum(-(logprob.sum() * advantage) for logprob, advantage in rows)
    return sum(len(answer) for answer in data["answer"].unbind()), float(loss)


def main() -> None:
    tq.init()
    keys = [
        f"step-0/prompt-{prompt}/sample-{sample}" for prompt in range(PROMPTS) for sample in range(SAMPLES)
    ]
    prompts = torch.randint(0, 100, (PROMPTS, 6)).repeat_interleave(SAMPLES, 0)
    fields = TensorDict({"prompt": prompts}, batch_size=[len(keys)])
    tags = [{"step": 0, "group": key.split("/")[1]} for key in keys]
    batch = tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields, tags=tags)
    for part in batch.chunk(2):  # two rollout workers
        rollout(part)
    advantages(batch)
    results = [train(part, rank) for rank, part in enumerate(batch.chunk(4))]  # four data-parallel ranks
    tokens = sum(tokens for tokens, _ in results)
    print(f"{len(tq.kv_list(PARTITION)[PARTITION])} samples, {tokens} tokens trained")
    tq.kv_clear(keys=keys, partition_id=PARTITION)
    print(f"{len(tq.kv_list(PARTITION).get(PARTITION, {}))} samples left")
    tq.close()


if __name__ == "__main__":
    main()
