"""The rollout engine for google-tunix: parameters both ways, and what `generate` gives.

Where tunix is installed its own types and models are used, else stand-ins of theirs.
"""

import dataclasses
import importlib
import importlib.util
import sys
import types

from flax import nnx
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.integrations import tunix_params
from tlt_jax.models import target
from tlt_jax.spec_decode.spot import spot as spot_lib

HAS_TUNIX = importlib.util.find_spec("tunix") is not None
MODULE = "tlt_jax.integrations.tunix"
V, D, F, L, N, K, H = 64, 32, 48, 2, 4, 2, 16
EOS, PAD = 3, 0


class Tokenizer:
  """A token per character."""

  def encode(self, text):
    return [ord(x) - 60 for x in text]

  def decode(self, ids):
    return "".join(chr(60 + i) for i in ids)

  def dedup_bos_ids(self, ids):
    return ids

  def bos_id(self):
    return None

  def eos_id(self):
    return EOS

  def pad_id(self):
    return PAD


@dataclasses.dataclass
class RolloutConfig:
  """The fields of tunix's that are read."""

  max_tokens_to_generate: int = 64
  temperature: float = 0.9
  top_p: float | None = 1.0
  top_k: int | None = None
  seed: object = None
  max_prompt_length: int = 64
  data_type: object = None
  eos_tokens: list[int] | None = None
  return_logprobs: bool = False


@dataclasses.dataclass
class RolloutOutput:
  text: list
  logits: list
  tokens: list
  left_padded_prompt_tokens: np.ndarray
  logprobs: list | None


@pytest.fixture(scope="module")
def tlt():
  """The module, on tunix or on stand-ins."""
  if HAS_TUNIX:
    yield importlib.import_module(MODULE)
    return
  base = types.SimpleNamespace(
    BaseRollout=object, RolloutConfig=RolloutConfig, RolloutOutput=RolloutOutput
  )
  with pytest.MonkeyPatch.context() as patch:
    for name in ("tunix", "tunix.rl", "tunix.rl.rollout"):
      patch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["tunix.rl.rollout"].base_rollout = base
    patch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
  sys.modules.pop(MODULE, None)


def tree(name: str, tied: bool = False) -> dict:
  """Parameters as tunix's model of that class has them, all different."""
  numbers = np.random.default_rng(0)

  def new(*shape):
    return jnp.asarray(numbers.normal(0, 0.3, shape), jnp.float32)


  def norm(size):
    return {"w": 1 + new(size)}


  def layer():
    heads = {"q": N, "k": K, "v": K}
    attn = {f"{x}_proj": {"w": new(D, n, H)} for x, n in heads.items()}
    attn["o_proj"] = {"w": new(N, H, D)}
    if name == "Qwen2":
      attn |= {f"{x}_bias": new(n * H) for x, n in heads.items()}
    if name == "Qwen3":
      attn |= {"q_norm": norm(H), "k_norm": norm(H)}
    sizes = {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}
    return {
      "input_layernorm": norm(D),
      "attn": attn,
      "post_attention_layernorm": norm(D),
      "mlp": {x: {"kernel": new(*size)} for x, size in sizes.items()},
    }

  made = {
    "embedder": {"input_embedding": new(V, D)},
    "layers": {i: layer() for i in range(L)},
    "final_norm": norm(D),
  }
  return made if tied else made | {"lm_head": {"w": new(D, V)}}


class Node(nnx.Module):
  """A module that has the parameters of a tree."""

  def __init__(self, tree):
    for name, x in tree.items():
      if name == "layers":
        self.layers = nnx.List([Node(layer) for layer in x.values()])
      else:
        setattr(self, name, Node(x) if isinstance(x, dict) else nnx.Param(x))


def actor(name: str = "Qwen3", tied: bool = False, **config):
  """A model of that class, as far as the engine looks at it."""
  made = type(name, (Node,), {})(tree(name, tied))
  made.config = types.SimpleNamespace(
    num_layers=L,
    vocab_size=V,
    embed_dim=D,
    hidden_dim=F,
    num_heads=N,
    head_dim=H,
    num_kv_heads=K,
    rope_theta=1_000_000,
    norm_eps=1e-6,
    **{"weight_tying" if name == "Llama3" else "use_tied_embedding": tied},
  )
  vars(made.config).update(config)
  return made


@pytest.mark.parametrize(
  "name, tied", [("Qwen2", True), ("Qwen3", False), ("Llama3", True)]
)
def test_parameters_go_both_ways(name, tied):
  """Every array of tunix's is one of ours, and comes back where it was."""
  model = actor(name, tied)
  config = tunix_params.model_config(model)
  ours = tunix_params.from_tunix(config, nnx.state(model, nnx.Param))

  def shapes(tree):
    return jax.tree.map(lambda x: x.shape, tree)

  abstract = flax.linen.meta.unbox(target.abstract_params(config))
  assert shapes(ours) == shapes(abstract)
  back = tunix_params.to_tunix(config, ours)
  jax.tree.map(np.testing.assert_array_equal, back, tree(name, tied))
  zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
  nnx.update(model, zeros)
  nnx.update(model, back)
  again = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  jax.tree.map(np.testing.assert_array_equal, again, tree(name, tied))


def test_a_model_that_we_would_compute_differently_is_refused(caplog):
  """Another class, experts, LoRA; and the trainer's own base of RoPE is taken over."""
  with pytest.raises(ValueError, match="Gemma3"):
    tunix_params.model_config(actor("Gemma3"))
  with pytest.raises(ValueError, match="experts"):
    tunix_params.model_config(actor(num_experts=8))
  lora = tree("Qwen3")
  lora["layers"][0]["attn"]["q_proj"]["w_lora_a"] = jnp.zeros((D, 2))
  with pytest.raises(ValueError, match="w_lora_a"):
    tunix_params.from_tunix(tunix_params.model_config(actor()), lora)
  assert not caplog.records
  assert tunix_params.model_config(actor("Llama3", rope_theta=500_000)).rope_theta == 1e6
  assert "RoPE's base at 1e+06, not at the 500000" in caplog.text
  assert tunix_params.model_config(actor("Qwen2", rope_theta=10_000)).rope_theta == 1e4


def mesh(devices: int = 1):
  """One of tunix's."""
  grid = np.array(jax.devices()[:devices]).reshape(devices, 1)
  return jax.sharding.Mesh(grid, ("fsdp", "tp"))


def make(tlt, model=None, devices=1, **options):
  """An engine for responses of up to 24 tokens."""
  config = settings(tlt)
  sizes = dict(slots=4, prompt_rows=4, prefill_rows=4, prefill_block=8, chunk=8)
  return tlt.Rollout(
    rollout_actor=model or actor(),
    tokenizer=Tokenizer(),
    mesh=mesh(devices),
    rollout_config=config,
    **{"strategies": ""} | sizes | options,
  )


def settings(tlt, **changes):
  fields = dict(max_prompt_length=8, max_tokens_to_generate=24, temperature=0.8)
  return tlt.base_rollout.RolloutConfig(**fields | changes)


PROMPTS = ["ABCD", "ABCD", "ABCD", "GH", "GH", "ABCD"]


@pytest.fixture(scope="module")
def engine(tlt):
  return make(tlt)


def test_an_answer_is_what_tunix_expects(tlt, engine):
  """Padding sides, where tokens and texts end, and log-probabilities of the learner."""
  rules = (("embed", "fsdp"), ("heads", "tp"), ("vocab", "tp"))
  with mesh(), flax.linen.logical_axis_rules(rules):  # of the actor, as tunix calls it
    out = engine.generate(PROMPTS, settings(tlt, return_logprobs=True))
  assert engine.model() is None and engine.pad_id() == PAD and engine.eos_id() == EOS
  padded = out.left_padded_prompt_tokens
  assert padded.shape == (6, 8) and padded.dtype == np.int32
  np.testing.assert_array_equal(padded[3], [PAD] * 6 + [ord("G") - 60, ord("H") - 60])
  np.testing.assert_array_equal(padded[5], padded[0])
  assert len({tuple(x) for x in out.tokens}) == 6  # each has noise of its own
  for x, text, logp in zip(out.tokens, out.text, out.logprobs, strict=True):
    assert PAD not in x and len(x) <= 24 and len(logp) == len(x)
    assert EOS not in x[:-1]
    ended = bool(len(x)) and x[-1] == EOS
    assert text == Tokenizer().decode(x[: len(x) - ended])
  assert any(len(x) and x[-1] == EOS for x in out.tokens)
  completions = np.full((6, 24), PAD, np.int32)
  for row, x in zip(completions, out.tokens, strict=True):
    row[: len(x)] = x
  scored = engine.get_per_token_logps(jnp.asarray(padded), jnp.asarray(completions))
  assert scored.shape == (6, 24)
  for row, logp in zip(scored, out.logprobs, strict=True):
    np.testing.assert_allclose(row[: len(logp)], logp, rtol=1e-4, atol=1e-4)


def test_parameters_are_taken_in_a_copy(tlt, engine):
  """Under tunix's guards; the learner donates what it handed in. Noise is never reused."""
  greedy = settings(tlt, temperature=0.0, top_p=None)
  before = engine.generate(PROMPTS, greedy).tokens
  model = actor()
  params = nnx.state(model, nnx.Param)
  sharpened = jax.tree.map(lambda x: x, params)
  sharpened["lm_head"]["w"] = nnx.Param(-params["lm_head"]["w"][...])
  guards = jax.transfer_guard_device_to_host, jax.transfer_guard_host_to_device
  for given in (sharpened, params):
    with guards[0]("disallow_explicit"), guards[1]("disallow_explicit"):
      engine.update_params(given, (nnx.Param,))
    after = engine.generate(PROMPTS, greedy).tokens
    same = all(map(np.array_equal, after, before))
    assert same == (given is params)
  jax.tree.map(lambda x: x.delete(), params)
  drawn = [engine.generate(PROMPTS, settings(tlt, seed=5)).tokens for _ in range(2)]
  assert not all(map(np.array_equal, *drawn))


@pytest.mark.slow  # programs of two rollouts of its own
def test_speculation_and_spot_training_change_no_token(tlt, engine, tmp_path):
  """On two slices, of which one trains the drafter when it has nothing left to draw."""
  sharp = actor()
  head = sharp.lm_head.w
  head[...] = 4.0 * head[...]
  plain = make(tlt, sharp, devices=2)
  rows = dict(row_tokens=16, context_tokens=8, rows=8, carried_rows=4)
  often = dict(updates_per_exchange=1, min_micro_batches=1)
  often |= dict(after_rollout_share=2.0)  # idle time may be too short to train
  several = make(
    tlt,
    sharp,
    devices=2,
    drafter="eagle2",
    strategies="up to 8 live: 2_1_3",
    spot=spot_lib.Options(**rows, **often),
  )
  for _ in range(2):
    one, other = (x.generate(PROMPTS, settings(tlt)).tokens for x in (plain, several))
    for a, b in zip(one, other, strict=True):
      np.testing.assert_array_equal(a, b)
  assert several.samples.mean_acceptance_length > 1
  assert several.samples.training_metrics()["drafter/updates"] > 0
  several.save_drafter(tmp_path / "drafter")
  drafted = make(tlt, sharp, drafter=tmp_path / "drafter", strategies="up to 8 live: 2_1_3")
  for a, b in zip(
    drafted.generate(PROMPTS, settings(tlt)).tokens,
    make(tlt, sharp).generate(PROMPTS, settings(tlt)).tokens,
    strict=True,
  ):
    np.testing.assert_array_equal(a, b)
