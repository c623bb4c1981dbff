"""What each process does under torchrun: calls on DTensors. The first one prints what came of them, as JSON."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from tunedqk.score import qk_score

BATCH, SEQ_LEN, HEAD_DIM = 4, 11, 16


def placements(text):
    """`r0` is replicated over the mesh's first dimension and sharded by batch over its second."""
    return [Replicate() if letter == "r" else Shard(int(letter)) for letter in text]


def letters(of):
    return "".join("r" if isinstance(one, Replicate) else str(one.dim) if isinstance(one, Shard) else "?" for one in of)


def case(mesh, layout, kv_heads, q_placed, k_placed, compiled):
    """Where the scores lie, how often processes communicated; raises if they are not those of a call on one of them."""
    torch.manual_seed(1)
    q_heads = 8 if kv_heads == 1 else 2 * kv_heads
    q, k = torch.randn(BATCH, q_heads, HEAD_DIM), torch.randn(BATCH, SEQ_LEN, kv_heads, HEAD_DIM)
    if layout == "HND":
        k = k.transpose(1, 2).contiguous()
    expected = qk_score(q, k, layout=layout)
    q_sharded, k_sharded = (
        distribute_tensor(x, mesh, placements(placed)) for x, placed in ((q, q_placed), (k, k_placed))
    )
    if compiled:  # which cannot be watched
        torch._dynamo.reset()
        scores = torch.compile(qk_score, fullgraph=True, backend="aot_eager")(q_sharded, k_sharded, layout=layout)
        moved = 0
    else:
        with CommDebugMode() as communication:
            scores = qk_score(q_sharded, k_sharded, layout=layout)
        moved = communication.get_total_counts()
    torch.testing.assert_close(scores.full_tensor(), expected, rtol=0, atol=0)
    return letters(scores.placements), moved


def _tensors(kind):
    """Arguments of a call that is not plain, in layout NHD, of 4 KV heads."""
    torch.manual_seed(3)
    q, k = torch.randn(BATCH, 8, HEAD_DIM), torch.randn(BATCH, 12, 4, HEAD_DIM)
    lens, starts = torch.tensor([12, 5, 0, 7]), torch.tensor([0, 2, 0, 7])
    table = torch.randperm(20).view(4, 5)[:, :4]
    tables = {
        "ragged": {"q": q, "k": k, "seq_lens": lens, "seq_starts": starts},
        "paged": {"q": q, "k": torch.randn(20, 3, 4, HEAD_DIM), "seq_lens": lens, "block_table": table},
        "causal": {"q": torch.randn(BATCH, 4, 8, HEAD_DIM), "k": k},
        "queries": {"q": torch.randn(BATCH, 4, 8, HEAD_DIM), "k": k},
        "token": {"q": q, "k": k, "k_scale": torch.rand(BATCH, 12, 4)},
        "head": {"q": q, "k": k, "k_scale": torch.rand(4)},
    }
    return tables[kind], {"causal": True} if kind == "causal" else {}


def other(mesh, kind, placed):
    """As case, for a call that is not plain. placed: by argument; the others are replicated."""
    tensors, options = _tensors(kind)
    quantised = "k_scale" in tensors

    def call(q, k, **others):
        return qk_score(q, k.to(torch.float8_e5m2) if quantised else k, **others, **options)

    expected = call(**tensors)
    sharded = {
        name: distribute_tensor(x, mesh, placements(placed.get(name, "r" * mesh.ndim))) for name, x in tensors.items()
    }
    with CommDebugMode() as communication:
        scores = call(**sharded)
    torch.testing.assert_close(scores.full_tensor(), expected, rtol=0, atol=0)
    return letters(scores.placements), communication.get_total_counts()


def gradients(mesh, q_placed, k_placed):
    """Raises if they are not those of a call on one process."""
    torch.manual_seed(2)
    q, k = torch.randn(BATCH, 8, HEAD_DIM), torch.randn(BATCH, SEQ_LEN, 4, HEAD_DIM)
    ours = [distribute_tensor(x, mesh, placements(p)).requires_grad_() for x, p in ((q, q_placed), (k, k_placed))]
    scores = qk_score(*ours, scale=None)
    weights = torch.randn(scores.shape)
    scores.backward(distribute_tensor(weights, mesh, scores.placements))
    one = [x.requires_grad_() for x in (q, k)]
    qk_score(*one, scale=None).backward(weights)
    for sharded, whole in zip(ours, one, strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)
    return "", 0


def refused(mesh):
    """What the errors say where `out` is given."""
    q, k, out = (distribute_tensor(torch.zeros(*s), mesh, [Replicate()]) for s in ((1, 2, 4), (1, 3, 2, 4), (1, 2, 3)))
    messages = []
    for arguments in ((q, k, out), (q.to_local(), k.to_local(), out)):
        try:
            qk_score(*arguments[:2], out=arguments[2])
        except TypeError as error:
            messages.append(str(error))
    return messages


def main():
    work = {"case": case, "other": other, "gradients": gradients, "refused": refused}
    answers = []
    dist.init_process_group("gloo")  # the default on a machine with a GPU serves no CPU
    for shape, cases in json.loads(sys.argv[1]):
        mesh = init_device_mesh("cpu", shape)
        answers += [work[name](mesh, *arguments) for name, *arguments in cases]
    if dist.get_rank() == 0:
        print("answers", json.dumps(answers))
    dist.barrier()  # one that leaves while another still talks to it takes that one down
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # after Python has ended, torch 2.13's own threads abort now and then


if __name__ == "__main__":
    main()
