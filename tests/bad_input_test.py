"""What users get wrong and what machines refuse: each gives an identified error and an exit code, and damages nothing.

usage: bad_input_test.py TRAIN OFFLOADD NO_URING
"""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

from trainer import Trainer

BRIEF_DAEMON = """#!/usr/bin/env python3
import socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[sys.argv.index("--socket") + 1])
listener.listen()
listener.accept()
sys.exit(3)
"""
REFUSING_DAEMON = """#!/usr/bin/env python3
import signal, socket, sys
def end(*_):
    open(sys.argv[0] + ".told", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[sys.argv.index("--socket") + 1])
listener.listen()
listener.accept()[0].close()
while True:
    signal.pause()
"""
TRAIN, OFFLOADD, NO_URING = (os.path.abspath(path) for path in sys.argv[1:4])
MODEL = ["--params", "1M", "--steps", "2", "--seq", "16", "--batch", "1", "--threads", "1", "--sample", "0", "--seed", "3"]
MEMORY_GROUPS = [("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")]
THREAD_GROUPS = [("/sys/fs/cgroup", "pids.max"), ("/sys/fs/cgroup/pids", "pids.max")]


def limit_of_new_group(folder, name):
    """Makes a control group below `folder`; the path of its limit, or None where there is none."""
    group = os.path.join(folder, f"offload-test-{os.getpid()}")
    try:
        os.mkdir(group)
    except OSError:
        return None
    if os.path.exists(os.path.join(group, name)):
        return os.path.join(group, name)
    os.rmdir(group)
    return None


class BadInputTest(unittest.TestCase):
    def setUp(self):
        self.pool = tempfile.mkdtemp(prefix="bad-", dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(shutil.rmtree, self.pool, True)

    def offloaded(self, *changes, pool=None):
        """The arguments of a small offloaded run; `changes` are flags with values that replace or add to them."""
        plain = [*MODEL, "--offload", "on", "--ram", "64MiB", "--nvme-path", pool or self.pool, "--job", "job", *changes]
        flags = dict(zip(plain[::2], plain[1::2]))
        return [word for flag in flags.items() for word in flag]

    def run_trainer(self, arguments, environment=None, launcher=()):
        run = Trainer(TRAIN, arguments, {"OFFLOADD_BINARY": OFFLOADD, **(environment or {})}, launcher)
        run.code = run.wait()
        return run

    def refused(self, arguments, identifier, *texts, code=1, environment=None, launcher=()):
        run = self.run_trainer(arguments, environment, launcher)
        self.assertEqual(run.code, code, run.stderr)
        for text in (identifier, *texts):
            self.assertIn(text, run.stderr)
        return run

    def losses(self, run):
        return [line["loss"] for line in run.steps()]

    def test_unknown_flag_is_answered_with_a_suggestion(self):
        self.refused(["--stpes", "3"], "OFD-1001", "--steps", code=2)

    def test_missing_pool(self):
        self.refused(self.offloaded(pool=self.pool + "/none"), "OFD-1201", "/none")

    def test_pool_that_is_a_file(self):
        path = os.path.join(self.pool, "file")
        open(path, "w", encoding="utf-8").close()
        self.refused(self.offloaded(pool=path), "OFD-1202", path)

    def test_pool_in_memory(self):
        kind = subprocess.run(["stat", "-f", "-c", "%T", "/dev/shm"], capture_output=True, text=True, check=False)
        if kind.stdout.strip() != "tmpfs":
            self.skipTest("/dev/shm is no tmpfs here")
        self.refused(self.offloaded(pool="/dev/shm"), "OFD-1203", "tmpfs")

    def test_pool_on_a_drive_that_is_too_small(self):
        self.refused_on("ext4", 24 << 20, "OFD-1204")

    def test_file_system_that_cannot_reserve_space(self):
        self.refused_on("ext2", 400 << 20, "OFD-1202", "EOPNOTSUPP", "ext4 or xfs")

    def refused_on(self, file_system, image_bytes, *words):
        if os.geteuid() != 0:
            self.skipTest("needs root for a loop mount")
        image, mount = os.path.join(self.pool, "image"), os.path.join(self.pool, "mount")
        os.mkdir(mount)
        with open(image, "wb") as file:
            file.truncate(image_bytes)
        if subprocess.run([f"mkfs.{file_system}", "-q", "-F", image], check=False).returncode != 0 or subprocess.run(
                ["mount", "-o", "loop", image, mount], capture_output=True, check=False).returncode != 0:
            self.skipTest("no loop mount here")
        try:
            self.refused(self.offloaded(pool=mount), *words)
            self.assertEqual([name for name in os.listdir(mount) if name != "lost+found"], [])
        finally:
            subprocess.run(["umount", mount], check=True)

    def test_budget_below_the_floor_shows_both_floors(self):
        run = self.refused(self.offloaded("--ram", "32MiB"), "OFD-1301", "least that trains", "without spilling")
        self.assertEqual(os.listdir(self.pool), [])
        self.assertGreaterEqual(run.stderr.count("MiB"), 6)  # the sum, item by item

    def test_budget_that_holds_nothing_at_all(self):
        self.refused(self.offloaded("--ram", "1MiB"), "OFD-1301", "passes through", "offloadctl plan")

    def test_budget_above_what_the_control_group_may_have(self):
        _, enter = self.control_group(MEMORY_GROUPS, 300 << 20)
        large = ["--params", "40M", "--ram", "512MiB"]
        self.refused(self.offloaded(*large), "OFD-1302", "memory", "control group", "Lower ram", launcher=enter)
        self.assertEqual(self.run_trainer(self.offloaded("--job", "small"), launcher=enter).code, 0)

    def test_too_few_threads_for_the_daemon_are_told_at_once(self):
        set_limit, enter = self.control_group(THREAD_GROUPS, 64)
        self.assertEqual(self.run_trainer(self.offloaded(), launcher=enter).code, 0)
        for limit in (6, 12, 18):
            set_limit(limit)
            self.refused(self.offloaded(), "OFD-1501", "--pids-limit", launcher=enter)
        for limit in range(20, 36, 2):  # some of these begin, and lack a thread later
            set_limit(limit)
            run = self.run_trainer(self.offloaded("--job", f"job{limit}"), launcher=enter)
            self.assertTrue(run.code == 0 or "--pids-limit" in run.stderr, run.stderr)

    def control_group(self, kinds, limit):
        """A control group with a limit: what sets another one, and what starts programs in it."""
        path = next(filter(None, (limit_of_new_group(*kind) for kind in kinds)), None)
        if path is None:
            self.skipTest("no such control group can be made here")
        group = os.path.dirname(path)
        self.addCleanup(os.rmdir, group)

        def set_limit(number):
            with open(path, "w", encoding="ascii") as file:
                file.write(str(number))

        set_limit(limit)
        return set_limit, ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "enter"]

    def test_job_that_is_open_elsewhere(self):
        other = Trainer(TRAIN, self.offloaded("--steps", "100000"), {"OFFLOADD_BINARY": OFFLOADD})
        try:
            while (line := other.read_line()) is not None and line["event"] != "step":
                pass
            self.refused(self.offloaded(), "OFD-1205", environment={"OFFLOADD_LOCK_TIMEOUT": "1"})
            self.assertEqual(other.read_line()["event"], "step")  # unharmed
        finally:
            other.kill("both")
            other.wait()

    def test_job_of_another_model_names_the_first_difference(self):
        self.assertEqual(self.run_trainer(self.offloaded()).code, 0)
        self.refused(self.offloaded("--params", "2M"), "OFD-1602", "model.")
        self.refused(self.offloaded("--dtype", "bf16"), "OFD-1602")
        self.assertEqual(self.run_trainer(self.offloaded("--steps", "3")).code, 0)  # the job is unharmed

    def test_truncated_store(self):
        self.assertEqual(self.run_trainer(self.offloaded()).code, 0)
        path = self.store()
        os.truncate(path, os.path.getsize(path) // 2)
        self.refused(self.offloaded("--steps", "3"), "OFD-1207")

    def test_flipped_bits_in_the_data_are_seen(self):
        self.assertEqual(self.run_trainer(self.offloaded()).code, 0)
        with open(self.store(), "r+b") as file:
            size = os.path.getsize(self.store())
            for offset in range(size // 3, size, 4096):  # metadata stands in front
                file.seek(offset)
                byte = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([byte ^ 1]))
        self.refused(self.offloaded("--steps", "3"), "OFD-1208")

    def test_gradients_that_are_not_finite_stop_at_the_step(self):
        self.refused(self.offloaded("--lr", "1e38", "--steps", "9", "--warm-up", "0"), "OFD-1701")
        resumed = self.run_trainer(self.offloaded("--steps", "1"))  # the last epoch is intact
        self.assertEqual(resumed.code, 0, resumed.stderr)
        self.assertGreaterEqual(resumed.start()["resumed_step"], 1)

    def test_without_io_uring_libaio_takes_over_and_says_so(self):
        forbidden = self.run_trainer(self.offloaded(), launcher=[NO_URING])
        self.assertEqual(forbidden.code, 0, forbidden.stderr)
        self.assertIn("I/O engine libaio", forbidden.stderr)
        self.assertIn("io_uring", forbidden.stderr)
        self.assertIn("EPERM", forbidden.stderr)
        plain = self.run_trainer(self.offloaded("--job", "plain"))
        self.assertEqual(self.losses(forbidden), self.losses(plain))

    def test_old_profiles_of_containers_refuse_more(self):
        run = self.run_trainer(self.offloaded(), launcher=[NO_URING, "--also", "statx"])
        self.assertEqual(run.code, 0, run.stderr)
        self.refused(self.offloaded("--job", "other"), "OFD-1501", "pidfd_open", "seccomp", launcher=[NO_URING, "--also", "pidfd_open"])
        self.refused(self.offloaded("--job", "other"), "OFD-1302", "memfd_create", "seccomp", launcher=[NO_URING, "--also", "memfd_create"])

    def test_engine_by_name_is_never_replaced(self):
        run = self.run_trainer(self.offloaded("--io", "uring"), launcher=[NO_URING])
        self.assertEqual(run.code, 1)
        self.assertIn("OFD-1211", run.stderr)

    def test_torch_without_avx2_would_have_other_bits(self):
        self.refused(self.offloaded(), "OFD-1604", "ATEN_CPU_CAPABILITY", environment={"ATEN_CPU_CAPABILITY": "default"})
        self.assertEqual(os.listdir(self.pool), [])  # before there is a job

    def test_no_place_for_the_socket_names_the_variable_for_another_one(self):
        launcher = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o ro none /tmp && exec "$@"', "enter"]
        if self.pool.startswith("/tmp/") or subprocess.run([*launcher, TRAIN, "--help"], capture_output=True, check=False).returncode != 0:
            self.skipTest("/tmp cannot be covered here, or the trainer or torch are in it")
        self.refused(self.offloaded(), "OFD-1501", "XDG_RUNTIME_DIR", launcher=launcher, environment={"XDG_RUNTIME_DIR": ""})

    def test_small_memlock(self):
        run = self.run_trainer(self.offloaded(), launcher=["prlimit", "--memlock=65536"])
        self.assertEqual(run.code, 0, run.stderr)

    def test_too_few_descriptors_for_the_daemon_are_told_at_once(self):
        for limit in (14, 20, 32):
            self.refused(self.offloaded(), "OFD-1218", "ulimit -n", "OFD-1501", "standard error", launcher=["prlimit", f"--nofile={limit}"])

    def test_a_daemon_that_ends_after_it_has_begun_to_listen_is_told_as_such(self):
        program = os.path.join(self.pool, "brief")
        with open(program, "w", encoding="utf-8") as file:
            file.write(BRIEF_DAEMON)
        os.chmod(program, 0o700)
        self.refused(self.offloaded(), "OFD-1501", "exit status 3", environment={"OFFLOADD_BINARY": program})

    def test_a_daemon_that_has_refused_its_trainer_is_told_to_end(self):
        program = os.path.join(self.pool, "refusing")
        with open(program, "w", encoding="utf-8") as file:
            file.write(REFUSING_DAEMON)
        os.chmod(program, 0o700)
        self.refused(self.offloaded(), "OFD-1801", environment={"OFFLOADD_BINARY": program})
        self.assertTrue(os.path.exists(program + ".told"), "it was killed after two minutes")

    def test_socket_that_nobody_listens_at(self):
        self.refused(self.offloaded(), "OFD-1501", "/none", "without OFFLOADD_SOCKET", environment={"OFFLOADD_SOCKET": "/none"})

    def test_daemon_that_cannot_be_started(self):
        self.refused(self.offloaded(), "OFD-1501", "/none", environment={"OFFLOADD_BINARY": "/none"})

    def store(self):
        return os.path.join(self.pool, "job.offload")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]], verbosity=2)
