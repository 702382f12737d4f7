"""Print the error of each Axolotl configuration in a JSON list on standard input; null for valid ones."""

from __future__ import annotations

import json
import os
import sys

from reward_kit.errors import ConfigError
from reward_kit.integrations.trl.axolotl import StepCreditPlugin

if __name__ == "__main__":
    told = []
    for config in json.load(sys.stdin):
        try:
            StepCreditPlugin().register(config)
            told.append(None if config["trainer_cls"].endswith(".AxolotlStepCreditTrainer") else "no trainer is named")
        except ConfigError as error:
            told.append(str(error))
    os.write(1, json.dumps(told).encode())
