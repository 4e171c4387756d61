"""Tests the archive that tools/wheel makes."""

import os
import subprocess
import sys
import tempfile
import unittest
import zipfile

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
sys.dont_write_bytecode = True

import wheel_archive  # noqa: E402  (needs the path above)


class WheelArchiveTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree, self.target = os.path.join(folder.name, "tree"), folder.name
        os.makedirs(os.path.join(self.tree, "offloadd"))
        self.write("__init__.py", '__version__ = "1.2.3"\n', 0o644)
        self.write("offloadd", "a program", 0o755)

    def write(self, name, text, mode):
        path = os.path.join(self.tree, "offloadd", name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, mode)

    def test_name_and_contents_say_the_version(self):
        path = wheel_archive.pack(self.tree, self.target)
        self.assertEqual(os.path.basename(path), "offloadd-1.2.3-py3-none-linux_x86_64.whl")
        with zipfile.ZipFile(path) as archive:
            self.assertIn(b"Version: 1.2.3\n", archive.read("offloadd-1.2.3.dist-info/METADATA"))

    def test_commands_are_on_the_path(self):
        with zipfile.ZipFile(wheel_archive.pack(self.tree, self.target)) as archive:
            self.assertIn(b"offloadd-run = offloadd.deepspeed.launcher:main\n", archive.read("offloadd-1.2.3.dist-info/entry_points.txt"))
            script = archive.read("offloadd-1.2.3.data/scripts/offloadctl").decode()
        self.write("offloadctl", "#!/bin/sh\necho \"$0 $*\"\n", 0o755)
        with open(os.path.join(self.tree, "script"), "w", encoding="utf-8") as file:
            file.write(script)
        done = subprocess.run([sys.executable, file.name, "ls", "/nvme0"], env={**os.environ, "PYTHONPATH": self.tree}, text=True,
                              capture_output=True, check=True)
        self.assertEqual(done.stdout, os.path.join(self.tree, "offloadd", "offloadctl") + " ls /nvme0\n")

    def test_programs_stay_programs(self):
        with zipfile.ZipFile(wheel_archive.pack(self.tree, self.target)) as archive:
            modes = {entry.filename: entry.external_attr >> 16 & 0o777 for entry in archive.infolist()}
        self.assertEqual((modes["offloadd/offloadd"], modes["offloadd/__init__.py"]), (0o755, 0o644))

    def test_the_record_names_every_file_with_its_digest(self):
        with zipfile.ZipFile(wheel_archive.pack(self.tree, self.target)) as archive:
            record = archive.read("offloadd-1.2.3.dist-info/RECORD").decode().splitlines()
            names = {line.split(",")[0] for line in record}
            self.assertEqual(names, set(archive.namelist()))
            for line in record[:-1]:
                name, digest, size = line.split(",")
                self.assertEqual((digest, int(size)), (wheel_archive.digest(archive.read(name)), len(archive.read(name))))

    def test_the_same_files_give_the_same_bytes(self):
        with open(wheel_archive.pack(self.tree, self.target), "rb") as first:
            before = first.read()
        with open(wheel_archive.pack(self.tree, self.target), "rb") as second:
            self.assertEqual(before, second.read())


if __name__ == "__main__":
    unittest.main()
