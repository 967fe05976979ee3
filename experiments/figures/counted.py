"""Compares chunks and passes of simulated rollouts with real ones, on many slices.

    python -m experiments.figures.counted --config=experiments/configs/tail.py:4 \\
      --config.batch.prompts=128 --slices=64 --layers=1

On a CPU the devices share its cores, so that counts are meaningful but times are not. One
rollout decodes plainly, one drafts chains of 3; a third, with one pass per chunk, gives the
accepted drafts at each token. Lengths are drawn from a log-normal distribution. With
--layers the policy has only its first layers, as counts do not depend on its tokens. The
simulator then follows the decisions of the first two rollouts. The last line is JSON, for
each of them: chunks, passes of the target, and whether bucket, live requests, steps, tokens
and passes of all chunks are equal.
"""

import dataclasses
import json

from absl import flags

from experiments import config as config_lib
from experiments import from_config
from experiments import launch
from experiments import trees
from tlt_jax import axes
from tlt_jax.rl import sample
from tlt_jax.simulate import acceptance as acceptance_lib
from tlt_jax.simulate import costs as costs_lib
from tlt_jax.simulate import rollout as simulated_lib
from tlt_jax.simulate import scenario as scenario_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

_SLICES = flags.DEFINE_integer("slices", 64, "Devices of a CPU.", lower_bound=1)

_LAYERS = flags.DEFINE_integer("layers", 0, "Of the policy; 0: all.", lower_bound=0)

CHAIN = strategy_lib.Strategy(3, 1, 4)
# Milliseconds of a step: counts do not depend on them.
_STEP = {"256": 1.0}
ANY = costs_lib.Measured({"steps": {"1": {"step_ms": {"off": _STEP, str(CHAIN): _STEP}}}})


def shallow(models: from_config.Models, layers: int) -> from_config.Models:
  """The policy without its last layers."""
  cut = {f"layer_{i}" for i in range(layers, models.model.num_layers)}
  return dataclasses.replace(
    models,
    model=dataclasses.replace(models.model, num_layers=layers),
    params={name: part for name, part in models.params.items() if name not in cut},
  )


def sampler(
  config: config_lib.RunConfig, models: from_config.Models, chain: bool
) -> sample.Sampler:
  """A sampler that decodes plainly, or drafts by chains."""
  selector = selector_lib.always(CHAIN) if chain else None
  drafter = models.drafter if chain else None
  return from_config.make_sampler(config, models.model, models.mesh, drafter, selector)


def watch(made: sample.Sampler) -> dict[tuple[int, int], int]:
  """Accepted drafts by (request, tokens drawn before), recorded while the sampler runs."""
  backend, accepted = made.rollout.backend, {}
  begin, run, running = backend.begin, backend.run, []

  def begun(now):
    running[:] = [now]
    begin(now)

  def watched(*args):
    owner, drawn = running[0].owner.reshape(-1), running[0].drawn.copy()
    result = run(*args)
    for i, count in zip(owner, result.emitted.count, strict=True):
      if i >= 0:
        accepted[int(i), int(drawn[i])] = int(count) - 1
    return result

  backend.begin, backend.run = begun, watched
  return accepted


def counts(samples: samples_lib.Samples) -> list[tuple]:
  """Bucket, strategy, live requests, steps, tokens and passes of each chunk."""
  return [
    (c.batch, c.strategy, c.live, c.steps, c.tokens, c.passes) for c in samples.chunks
  ]


def main(config: config_lib.RunConfig):
  launch.start(_SLICES.value)
  config, _ = from_config.complete(config)
  models = from_config.load_models(config)
  models = shallow(models, _LAYERS.value) if _LAYERS.value else models
  P, R = config.batch.prompts, config.batch.responses
  records = list(
    from_config.load_prompts(
      config.prompts | {"size": P}, from_config.prompt_rules(config)
    ).records
  )

  most = config.sampling.max_tokens
  what = {"log_normal": {"median": most / 6, "sigma": 1.0}}
  lengths = scenario_lib.draw_lengths(what, P * R, most, config.seed)

  def run(made: sample.Sampler, chain: bool) -> sample.Scored:
    return made(models.params, records, R, seed=config.seed, lengths=lengths)

  one_pass = {"rollout.chunk": CHAIN.depth + 1, "rollout.buckets": ()}
  single = sampler(trees.change(config, one_pass), models, True)
  accepted = watch(single)
  run(single, True)
  machine = simulated_lib.Machine(models.mesh.shape[axes.DATA], ANY)
  found = {}
  for name, chain in (("plain", False), (str(CHAIN), True)):
    scored = run(sampler(config, models, chain), chain)
    real = scored.samples
    again = simulated_lib.simulate(
      machine,
      models.model,
      from_config.rollout_options(config),
      scored.requests,
      real.length,
      selector=selector_lib.always(CHAIN) if chain else None,
      acceptance=acceptance_lib.Replay(accepted) if chain else None,
      decide=clock_lib.Decisions(real.decisions),
    )
    found[name] = {
      "requests": len(real.length),
      "tokens": int(real.length.sum()),
      "chunks": [len(real.chunks), len(again.chunks)],
      "passes": [real.passes, again.passes],
      "equal": counts(real) == counts(again),
    }
    print(name, found[name], flush=True)
  print(json.dumps({"slices": _SLICES.value} | found))


if __name__ == "__main__":
  read = trees.from_flags("tail", config_lib.RunConfig)
  launch.run(main, config=read)
