"""deepspeed.add_config_arguments()."""

import argparse


def add_config_arguments(parser):
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="use DeepSpeed (here: offloadd)")
    group.add_argument("--deepspeed_config", default=None, type=str, help="a DeepSpeed configuration, as JSON")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser
