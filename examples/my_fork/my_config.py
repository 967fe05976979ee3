from experiments.configs import countdown


def get_config(arg: str = ""):
  config = countdown.get_config(arg)
  config.algorithm = dict(name="my_package.rloo", scale=1.0)
  config.prompts = dict(source="my_package.parity.Problems", split="train", size=10**6)
  size = config.held_out.size
  config.held_out = dict(source="my_package.parity.Problems", split="test", size=size)
  config.reward = "my_package.parity.score + 0.1 * my_package.brief.score"
  config.drafter = ""
  config.strategies = "up to 8 live: off or my_package.repeat_3"
  return config
