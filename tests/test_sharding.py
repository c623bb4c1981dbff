"""DTensors: sharded over batch, heads or positions the call stays so, without communication; by processes on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tunedqk import sharding
from tunedqk.score import qk_score

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is not distributed")

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
PROJECT = Path(__file__).parents[1]
# KV heads over the placements of q and k (`sharded.placements`): then those of the scores, and whether bytes moved.
NHD = [
    (4, "0", "0", "0", False),  # batch
    (4, "1", "2", "1", False),  # heads
    (4, "r", "1", "2", False),  # positions
    (4, "r", "r", "r", False),
    (1, "1", "r", "1", False),  # the query heads of one KV head
    (4, "1", "r", "1", False),
    (4, "2", "3", "r", True),  # head_dim: no rule
    (3, "1", "2", "r", True),  # KV heads that do not go by two
]
HND = [(4, "0", "0", "0", False), (4, "1", "1", "1", False), (4, "r", "2", "2", False)]
TWO_DIMENSIONS = [
    (4, "01", "02", "01", False),  # batch over one, heads over the other
    (4, "0r", "01", "02", False),
    (4, "11", "22", "11", False),
    (2, "r1", "12", "21", False),
    (6, "11", "22", "rr", True),  # six KV heads would go by two, but not by two twice
]

# Calls that are not plain: the placements of their arguments, of the scores, and whether bytes moved.
OTHERS = [
    ("ragged", {"q": "0", "k": "0", "seq_lens": "0", "seq_starts": "0"}, "0", False),
    ("ragged", {"q": "1", "k": "2"}, "1", False),
    ("ragged", {"k": "1"}, "r", True),  # a part of the positions does not know which are hidden
    ("paged", {"q": "0", "seq_lens": "0", "block_table": "0"}, "0", False),
    ("paged", {"q": "1", "k": "2"}, "1", False),
    ("paged", {"k": "0"}, "r", True),  # a part of the pool
    ("causal", {"q": "0", "k": "0"}, "0", False),
    ("causal", {"q": "2", "k": "2"}, "1", False),
    ("causal", {"k": "1"}, "r", True),
    ("queries", {"k": "1"}, "3", False),
    ("token", {"q": "0", "k": "0", "k_scale": "0"}, "0", False),
    ("token", {"q": "1", "k": "2", "k_scale": "2"}, "1", False),
    ("token", {"k": "1", "k_scale": "1"}, "2", False),
    ("head", {"q": "1", "k": "2", "k_scale": "0"}, "1", False),
]


def torchrun(processes, meshes):
    """What the first of these processes answers to each case on each mesh."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (str(PROJECT), environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("sharded.py")), json.dumps(meshes)],
        env=environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("answers "))
    return json.loads(line.removeprefix("answers "))


def expected(wanted):
    return [[placed, moved] for *_, placed, moved in wanted]


def answered(answers):
    return [[placed, moved > 0] for placed, moved in answers]


def test_a_sharded_call_stays_sharded_and_moves_nothing_compiled_and_with_gradients_as_well():
    plain = [("case", layout, *one[:3], False) for layout, table in (("NHD", NHD), ("HND", HND)) for one in table]
    compiled = [("case", "NHD", *one[:3], True) for one in NHD[:3]]
    gradients = [("gradients", q, k) for _, q, k, _, _ in NHD[:4]]
    if TORCH < (2, 13):  # where DTensor cannot multiply what is sharded over heads; 2.11 cannot
        gradients.remove(("gradients", "1", "2"))
    answers = torchrun(2, [[[2], [*plain, *compiled, *gradients, ("refused",)]]])
    assert answered(answers[: len(plain)]) == expected([*NHD, *HND])
    assert answered(answers[len(plain) :][:3]) == expected(NHD[:3])
    message = "out: expected None where a tensor of the call is a DTensor, got a tensor"
    assert answers[-1] == [message, message]


def test_a_call_that_is_not_plain_stays_sharded_where_each_part_knows_what_is_hidden():
    for processes in (2, 4):
        answers = torchrun(processes, [[[processes], [("other", kind, placed) for kind, placed, *_ in OTHERS]]])
        assert answered(answers) == expected(OTHERS)


def test_on_meshes_of_four_processes():
    tables = [([4], "NHD", [one for one in NHD if one[0] != 3]), ([4], "HND", HND), ([2, 2], "NHD", TWO_DIMENSIONS)]
    meshes = [[mesh, [("case", layout, *one[:3], False) for one in table]] for mesh, layout, table in tables]
    assert answered(torchrun(4, meshes)) == expected(one for _, _, table in tables for one in table)


class Mesh:
    def __init__(self, *shape):
        self.shape, self.ndim = shape, len(shape)


@pytest.mark.parametrize(
    ("count", "shape", "even"),
    [
        (4, (2,), True), (3, (2,), False), (2, (4,), True), (8, (8, 4), True), (24, (4, 4), False), (24, (4, 2), True),
        (12, (2, 3, 2), True), (12, (2, 2, 2), False), (8, (3, 2), False),
    ],
)  # fmt: skip
def test_heads_split_evenly_over_every_part_of_a_mesh_that_they_fill(count, shape, even):
    assert sharding._splits_evenly(count, Mesh(*shape)) is even


# --- Other kinds of tensors ---


def test_fake_tensors_give_a_fake_result():
    with FakeTensorMode():
        q, k = torch.empty(2, 4, 16, dtype=torch.bfloat16), torch.empty(2, 9, 2, 16, dtype=torch.bfloat16)
        scores = qk_score(q, k, out_dtype=torch.float32)
        assert (scores.shape, scores.dtype) == ((2, 4, 9), torch.float32)
        assert type(scores) is type(q)


def test_a_real_call_of_the_same_shapes_is_not_taken_for_a_fake_one(device):
    q, k = torch.ones(2, 4, 16), torch.ones(2, 9, 2, 16)
    with FakeTensorMode() as mode:
        qk_score(mode.from_tensor(q), mode.from_tensor(k))
    scores = qk_score(q.to(device), k.to(device))
    assert type(scores) is torch.Tensor
    assert torch.equal(scores, torch.full_like(scores, 16))


def test_a_subclass_keeps_its_kind(device):
    class Tagged(torch.Tensor):
        pass

    q, k = torch.ones(1, 2, 16, device=device), torch.ones(1, 5, 2, 16, device=device)
    scores = qk_score(q.as_subclass(Tagged), k)
    assert type(scores) is Tagged
    assert type(qk_score(q, k)) is torch.Tensor
    assert type(qk_score(torch.nn.Parameter(q, requires_grad=False), k)) is torch.Tensor
