"""The program zero_to_fp32.py that DeepSpeed leaves beside its checkpoints, for ours."""

import argparse

from .files import write_text
from .utils import convert_zero_checkpoint_to_fp32_state_dict

_PROGRAM = """#!/usr/bin/env python
# zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR: the weights of the checkpoint that is the latest there, as fp32.
from offloadd.deepspeed.to_fp32 import main

main()
"""


def leave_at(path):
    write_text(path, _PROGRAM)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="zero_to_fp32.py", description="Writes the weights of a checkpoint as fp32.")
    parser.add_argument("checkpoint_dir", help="the folder that was given to save_checkpoint()")
    parser.add_argument("output_dir", help="a folder for pytorch_model.bin, or model.safetensors")
    parser.add_argument("--max_shard_size", default="5GB", help=argparse.SUPPRESS)
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors")
    parser.add_argument("-t", "--tag", help="another checkpoint than the latest")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="only what is trained")
    parser.add_argument("-d", "--debug", action="store_true", help=argparse.SUPPRESS)
    told = vars(parser.parse_args(arguments))
    told.pop("debug")
    convert_zero_checkpoint_to_fp32_state_dict(**told)
