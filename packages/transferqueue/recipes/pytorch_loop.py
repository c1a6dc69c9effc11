"""Policy gradient with generation and training in two processes and a queue each way: run this file."""

import multiprocessing

import torch
import transferqueue as tq

GROUP, STEPS, AHEAD = 16, 150, 1  # answers to a question, optimizer steps, steps that generation is ahead


def generate(address: str) -> None:
    """Answers questions with the policy it was sent last, and rewards answers near twice the question."""
    queue = tq.connect(address)
    train = queue.partition("train", tasks={"actor": ["question", "answer", "reward"]})
    for policy in queue.partition("policy", tasks={"rollout": ["weight"]}).stream("rollout", 1):
        question = torch.randn(1, 4).expand(GROUP, 4).contiguous()
        answer = question @ policy.restore()["weight"][0].T + 0.5 * torch.randn(GROUP, 4)
        reward = -(answer - 2 * question).square().sum(1)
        train.put({"question": question, "answer": answer, "reward": reward}, version=policy.versions[0])
        policy.ack()


def main() -> float:
    """Trains; returns how far the weights are from 2 on the diagonal, on average (2 / 4 at the start)."""
    with tq.serve(max_bytes="64MiB") as server, tq.connect(server) as queue:
        producer = multiprocessing.get_context("spawn").Process(target=generate, args=(server.address,))
        producer.start()
        policy = queue.partition("policy", tasks={"rollout": ["weight"]})
        train = queue.partition("train", tasks={"actor": ["question", "answer", "reward"]})
        weight = torch.zeros(4, 4, requires_grad=True)
        optimizer = torch.optim.Adam([weight], lr=0.1)
        policy.put({"weight": weight.detach().expand(1 + AHEAD, 4, 4)})
        for step in range(1, STEPS + 1):
            batch = train.fetch("actor", GROUP, max_staleness=AHEAD)  # waits in the store
            sample = batch.restore(copy=True)
            advantage = (sample["reward"] - sample["reward"].mean()) / sample["reward"].std()
            logprob = -(sample["answer"] - sample["question"] @ weight.T).square().sum(1)
            optimizer.zero_grad()
            (-advantage * logprob).mean().backward()
            optimizer.step()
            batch.ack()  # trained: these samples never come again
            policy.put({"weight": weight.detach()[None]}, version=step)
        policy.close()
        producer.join()
        return float((weight.detach() - 2 * torch.eye(4)).abs().mean())


if __name__ == "__main__":
    print(f"mean distance from the true weights: {main():.2f} (0.50 at the start)")
