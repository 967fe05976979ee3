"""The stable API, as the README shows it."""

import pathlib
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import commands
from tlt_jax import api
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import eagle_files

home = commands.home
README = (commands.ROOT / "README.md").read_text()
EXAMPLE = re.search(r"## Use it from Python\n[^#]*?\n\n((?: {4}.*\n|\n)+)", README)[1]


@pytest.mark.slow  # programs of a rollout of its own
def test_the_lines_of_the_readme_run(home, tmp_path):
  """Ten at most. A trainer's parameters are taken in, and the drafter changes no token."""
  drafter = drafter_lib.of_target(commands.COUNTDOWN)
  params = drafter_lib.init_params(drafter, jax.random.key(1))
  eagle_files.save(tmp_path / "drafter", drafter, params)
  lines = textwrap.dedent(EXAMPLE).strip()
  assert len([line for line in lines.splitlines() if line]) <= 10
  lines = lines.replace("runs/quickstart/policy", str(home / "policy"))
  lines = lines.replace("runs/quickstart/drafter", str(tmp_path / "drafter"))
  lines, replaced = re.subn(r"max_tokens=\d+,", "max_tokens=24,", lines)
  assert replaced == 2
  lines = lines.replace(' strategies="', ' slots=4, devices=one, strategies="')
  made = {"one": jax.devices()[:1]}
  exec(lines, made)
  policy, requests, samples = (made[k] for k in ("policy", "requests", "samples"))
  assert isinstance(policy, api.Policy) and isinstance(samples, api.Samples)
  assert len(requests) == 16 and all(0 < n <= 24 for n in samples.length)
  assert samples.mean_acceptance_length > 1
  other = jax.devices()[1]  # a trainer's device
  trained = policy.place(jax.device_put(policy.params, other))
  zeros = jax.device_put(jax.tree.map(jnp.zeros_like, params), other)
  zeros = policy.place_drafter(zeros)
  again = policy.rollout(trained, requests, zeros)
  np.testing.assert_array_equal(again.tokens, samples.tokens)


def test_what_is_laid_out_outlives_what_was_handed_in(home):
  """In the policy's dtype; without strategies nothing drafts."""
  policy = api.load(
    home / "policy",
    max_prompt=8,
    max_tokens=8,
    strategies="",
    dtype="bfloat16",
    devices=jax.devices()[:1],
  )
  assert policy.drafter is None and policy.engine.selector is None
  handed_in = jax.tree.map(lambda x: x.astype(jnp.float32), policy.params)
  placed = policy.place(handed_in)
  jax.tree.map(lambda x: x.delete(), handed_in)
  jax.tree.map(np.testing.assert_array_equal, placed, policy.params)
  assert placed["head"].dtype == jnp.bfloat16
  assert pathlib.Path(policy.folder) == home / "policy"
  with pytest.raises(ValueError, match="there is no drafter"):
    policy.place_drafter({})


def test_parameters_of_other_devices_are_laid_out_on_its_own(home, tmp_path):
  """Policy and drafter, on one device and split over two; always as a copy."""
  drafter = drafter_lib.of_target(commands.COUNTDOWN)
  params = drafter_lib.init_params(drafter, jax.random.key(1))
  eagle_files.save(tmp_path / "drafter", drafter, params)
  for devices in (jax.devices()[1:2], jax.devices()[1:3]):
    policy = api.load(
      home / "policy",
      tmp_path / "drafter",
      max_prompt=8,
      max_tokens=8,
      tensor_parallel=len(devices),
      devices=devices,
    )
    for place, own in (
      (policy.place, policy.params),
      (policy.place_drafter, policy.draft_params),
    ):
      elsewhere = jax.device_put(jax.tree.map(np.asarray, own), jax.devices()[0])
      for given in (elsewhere, own):
        placed = place(given)
        jax.tree.map(np.testing.assert_array_equal, placed, own)
        jax.tree.map(check_laid_out, placed, own)


def check_laid_out(x, like):
  """As `like`, but in other memory."""
  assert x.sharding == like.sharding and x.dtype == like.dtype
  for a, b in zip(x.addressable_shards, like.addressable_shards, strict=True):
    assert a.data.unsafe_buffer_pointer() != b.data.unsafe_buffer_pointer()
