"""Tests what nvcc made of the arithmetic of updates and sums, where there may be no GPU to run it.

Bit equality with the processor's kernels needs that every operation rounds once, to nearest, and that none is fused or
approximated: PTX says of each operation how it rounds, and the assembler may not change that.

Usage: device_ptx_test.py UPDATE.ptx SUM.ptx
"""

import re
import sys
import unittest

PTX = SUM = ""
ROUNDING = {"add", "sub", "mul", "fma", "div", "sqrt"}
# "@%p1 add.rn.f32 %f3, %f1, %f2;": the operation and what qualifies it.
OPERATION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z0-9]+)((?:\.[a-z0-9]+)*)\.f(?:32|64)\s", re.MULTILINE)
DTYPES = 6  # of weight and gradient
KERNELS = 7 * DTYPES + DTYPES + 1  # rules; of LAMB the sums of squares, and its ratio
SUMS = 2  # dtypes of gradients


def operations(text):
    return [(name, qualifiers.split(".")[1:]) for name, qualifiers in OPERATION.findall(text)]


class PtxTest(unittest.TestCase):
    def test_there_is_a_kernel_for_every_rule_and_dtype(self):
        self.assertEqual(len(re.findall(r"\.entry\s", PTX)), KERNELS)

    def test_every_operation_rounds_once_to_nearest(self):
        seen = set()
        for name, qualifiers in operations(PTX):
            if name in ROUNDING:
                self.assertEqual(qualifiers, ["rn"], name)
                seen.add(name)
            self.assertNotIn(name, ("mad", "rsqrt", "rcp", "ex2", "lg2"))
        self.assertEqual(seen, ROUNDING)

    def test_subnormal_numbers_are_kept(self):
        self.assertNotRegex(PTX + SUM, r"\.ftz|\.approx")

    def test_sums_round_once_to_nearest_and_nothing_is_fused(self):
        self.assertEqual(len(re.findall(r"\.entry\s", SUM)), SUMS)
        computed = [(name, qualifiers) for name, qualifiers in operations(SUM) if name in ROUNDING | {"mad"}]
        self.assertEqual({name for name, _ in computed}, {"add", "mul"})
        self.assertEqual({tuple(qualifiers) for _, qualifiers in computed}, {("rn",)})

    def test_what_may_be_fused_is_seen(self):
        self.assertEqual(operations("\tmul.f32 %f1, %f2, %f3;\n\t@%p1 div.full.f32 %f1, %f2, %f3;\n"),
                         [("mul", []), ("div", ["full"])])


if __name__ == "__main__":
    with open(sys.argv.pop(), encoding="utf-8") as file:
        SUM = file.read()
    with open(sys.argv.pop(), encoding="utf-8") as file:
        PTX = file.read()
    unittest.main()
