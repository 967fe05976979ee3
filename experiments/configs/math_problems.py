"""DAPO on a file of MATH-style problems with Qwen2.5, Qwen3 or Llama 3.1.

    python -m experiments.train --config=experiments/configs/math_problems.py:qwen3_8b \\
        --config.policy=/models/Qwen3-8B \\
        --config.prompts.path=math_train.jsonl \\
        --config.held_out.path=math_test.jsonl --workdir=runs/math

The files hold one {"problem", "answer"} object per line, the answer in LaTeX, without the
box; `tlt_jax.tasks.latex.score` compares by value.

| argument | model | devices per slice |
|---|---|---|
| none, `:qwen2_5_7b` | Qwen2.5-7B-Instruct | 4 |
| `:qwen2_5_1_5b` | Qwen2.5-1.5B-Instruct | 2 |
| `:qwen3_8b` | Qwen3-8B | 4 |
| `:llama3_1_8b` | Llama-3.1-8B-Instruct | 4 |

`--config.algorithm.name=dr_grpo` is another algorithm, with its own defaults. Made for 8
accelerators of 80 GB; `--dry_run` says what the plan of memory is there. Shapes are checked
on every test run; it has not been run to its end, so wall time and accuracy are not known.
`:smoke` shrinks every size for a tiny model on a CPU. Sizes and entries are those of
`configs/qwen2_5_7b.py`.
"""

import ml_collections

from experiments.configs import qwen2_5_7b

MODELS = {  # argument -> folder of the policy, devices per slice
  "qwen2_5_7b": ("Qwen2.5-7B-Instruct", 4),
  "qwen2_5_1_5b": ("Qwen2.5-1.5B-Instruct", 2),
  "qwen3_8b": ("Qwen3-8B", 4),
  "llama3_1_8b": ("Llama-3.1-8B-Instruct", 4),
}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  if arg not in ("", "smoke", *MODELS):
    raise ValueError(
      f"this config takes the argument {', '.join(MODELS)}, smoke or none, not {arg!r}"
    )
  config = qwen2_5_7b.get_config("smoke" if arg == "smoke" else "")
  if arg in MODELS:
    config.policy, config.tensor_parallel = MODELS[arg]
  config.reward = "tlt_jax.tasks.latex.score"
  config.algorithm = dict(name="dapo", clip_low=0.2, clip_high=0.28, overlong_share=0.2)
  return config
