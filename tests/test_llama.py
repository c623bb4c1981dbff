"""A real client: what a Llama of Hugging Face's attends to while it decodes, from its caches as they lie."""

from __future__ import annotations

import math

import pytest
import torch
from reference import gamma

from tunedqk.score import qk_score

pytest.importorskip("transformers")

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

LAYERS, Q_HEADS, HEAD_DIM = 2, 4, 16
PROMPT, PADDING = 6, 3
STEPS = (1, 1, 1, 4, 1)  # how many tokens each feeds; several are a draft to be verified
CAPACITY = PROMPT + sum(STEPS) + 3  # of a StaticCache, which is never full


def make_model(kv_heads, device):
    """Random weights, large enough that its attention is far from even."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=Q_HEADS * HEAD_DIM,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=Q_HEADS,
        num_key_value_heads=kv_heads,
        initializer_range=0.15,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).to(device).eval()


@torch.no_grad()
def feed(model, cache, mask, count):
    """Feeds the last `count` positions of the mask: each layer's rotated queries, and its attention weights."""
    queries = {}

    def note(attention, _, inputs):
        hidden = inputs["hidden_states"]
        q = attention.q_proj(hidden).unflatten(-1, (Q_HEADS, HEAD_DIM)).transpose(1, 2)
        queries[attention.layer_idx], _ = apply_rotary_pos_emb(q, q, *inputs["position_embeddings"])

    tokens = torch.randint(model.config.vocab_size, (len(mask), count)).to(mask.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -count:]
    hooks = [layer.self_attn.register_forward_pre_hook(note, with_kwargs=True) for layer in model.model.layers]
    # By position: what the cache is called depends on the version.
    weights = model(tokens, mask, positions, cache, output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    return [(queries[layer], weights[layer]) for layer in range(LAYERS)]


def assert_attention(scores, weights, q, k):
    """Their softmax is the model's weights, whose zeros are exact.

    Both scores are within gamma * |q||k| * scale of the truth, which softmax doubles; as much again for its own
    roundings.
    """
    magnitude = (q.norm(dim=-1).max() * k.norm(dim=-1).max()).item() * HEAD_DIM**-0.5
    tolerance = 8 * gamma(HEAD_DIM + 2) * magnitude
    torch.testing.assert_close(scores.softmax(-1), weights, rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    ("kv_heads", "static", "padded"),
    [
        pytest.param(Q_HEADS, False, False, id="mha-dynamic"),
        pytest.param(Q_HEADS, True, True, id="mha-static-padded"),
        pytest.param(Q_HEADS // 2, False, True, id="gqa-dynamic-padded"),
        pytest.param(Q_HEADS // 2, True, False, id="gqa-static"),
    ],
)
def test_scores_are_what_the_model_attends_by(device, kv_heads, static, padded, monkeypatch):
    monkeypatch.setenv("TUNEDQK_MODE", "cached")  # nothing is tuned
    model = make_model(kv_heads, device)
    cache = StaticCache(config=model.config, max_cache_len=CAPACITY) if static else DynamicCache(config=model.config)
    mask = torch.ones(2, PROMPT, dtype=torch.int64, device=device)
    starts = torch.tensor([0, PADDING], device=device) if padded else None
    if padded:
        mask[1, :PADDING] = 0
    feed(model, cache, mask, PROMPT)
    for count in STEPS:
        mask = torch.nn.functional.pad(mask, (0, count), value=1)
        filled = mask.shape[1]
        lens = torch.full((2,), filled, device=device) if static else None
        for layer, (q, weights) in enumerate(feed(model, cache, mask, count)):
            k = cache.layers[layer].keys
            assert k.shape == (2, kv_heads, CAPACITY if static else filled, HEAD_DIM)
            k[:, :, filled:] = math.nan  # what lies there is not read
            options = {"scale": None, "layout": "HND", "seq_lens": lens, "seq_starts": starts}
            if count == 1:
                scores = qk_score(q[:, :, 0], k, **options)
                assert_attention(scores, weights[:, :, 0], q, k[:, :, :filled])
            else:
                scores = qk_score(q, k, causal=True, **options)
                assert_attention(scores, weights, q, k[:, :, :filled])
            assert scores[..., filled:].isneginf().all()
            k[:, :, filled:] = 0  # as the model expects it
