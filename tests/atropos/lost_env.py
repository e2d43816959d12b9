"""An environment that passes on only the first of its servers: Atropos then uses ports 9004 to 9007 instead."""

from sorting_env import SortingEnv


class LostEnv(SortingEnv):
    name = "lost"

    def __init__(self, config, server_configs, slurm=False, testing=False):
        super().__init__(config, server_configs[0], slurm, testing)


if __name__ == "__main__":
    LostEnv.cli()
