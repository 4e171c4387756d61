"""Tests the layer check on samples, then the tree itself."""

import os
import sys
import unittest

# Runfiles are links to the tree: following one leads to its root.
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))

import layer_check  # noqa: E402  (needs the path above)


def violations(path, *includes):
    return list(layer_check.violations_in(path, "".join(f"#include {i}\n" for i in includes)))


class LayerCheckTest(unittest.TestCase):
    def test_arrows_of_the_map_are_allowed(self):
        self.assertEqual(violations("swap/store.cc", '"swap/store.h"', '"aio/device.h"', "<vector>"), [])
        self.assertEqual(violations("zero3/torch/x.cc", '"zero3/planner.h"', "<torch/types.h>"), [])
        self.assertEqual(violations("aio/uring_queue.cc", "<liburing.h>"), [])
        self.assertEqual(violations("aio/uring_ring.h", "<liburing.h>"), [])

    def test_arrows_against_the_map_are_found(self):
        for path, include in [
            ("client/client.cc", '"swap/store.h"'),
            ("client/client.cc", '"offloadd/session.h"'),
            ("offloadd/session.cc", '"client/client.h"'),
            ("swap/store.cc", '"proto/shm_abi.h"'),
            ("aio/device.cc", '"swap/store.h"'),
            ("base/error.cc", '"tests/support.h"'),
            ("zero3/planner.cc", '"zero3/torch/engine.h"'),
            ("tools/offloadctl.cc", '"offloadd/daemon.h"'),
        ]:
            self.assertEqual(len(violations(path, include)), 1, (path, include))

    def test_torch_and_liburing_stay_in_their_places(self):
        self.assertEqual(len(violations("zero3/planner.cc", "<torch/types.h>")), 1)
        self.assertEqual(len(violations("offloadd/main.cc", "  <ATen/ATen.h>")), 1)
        self.assertEqual(len(violations("aio/device.cc", "<liburing.h>")), 1)

    def test_indented_directive_is_seen_and_comment_is_not(self):
        self.assertEqual(len(list(layer_check.violations_in("base/a.h", '  # include "aio/device.h"'))), 1)
        self.assertEqual(list(layer_check.violations_in("base/a.h", '// #include "aio/device.h"')), [])

    def test_the_tree_follows_the_arrows(self):
        self.assertEqual(layer_check.main(ROOT), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
