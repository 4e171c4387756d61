"""The name `deepspeed` over offloadd: what is imported from here is offloadd.deepspeed (docs/from_deepspeed.md)."""

import offloadd.deepspeed

_is_offloadd = True
offloadd.deepspeed.install()
