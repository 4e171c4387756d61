"""Installs into a folder, builds examples/cmake there with CMake and with pkg-config, and trains with it.

Usage: install_test.py LIBRARY HEADER DAEMON TOOL VERSION_HEADER PRELOADED PLUGIN HEADER… PLAIN
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

FILES = {}  # by option; headers in a list
HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLE = os.path.join(os.path.dirname(HERE), "examples", "cmake")
PLAIN = os.path.abspath(sys.argv[11])  # a trainer that is built without offload
C_TRAINER = os.path.join(os.path.dirname(HERE), "tests", "c_trainer.c")


def call(*words, expect=0, **options):
    """Runs a program; returns what it said."""
    result = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    if result.returncode != expect:
        raise AssertionError(f"{words} ended with {result.returncode}:\n{result.stdout}")
    return result.stdout


def install(prefix, expect=0, **instead):
    """Installs into a prefix; returns what was said."""
    files = FILES | instead
    words = [word for name, paths in files.items() for path in paths for word in (f"--{name}", path)]
    return call(sys.executable, os.path.join(HERE, "install.py"), "--prefix", prefix, *words, expect=expect)


def losses(text):
    """Returns the lines of a trainer that say a loss."""
    return [line for line in text.splitlines() if line.startswith("step ")]


class InstallTest(unittest.TestCase):
    """All cases share one prefix: a compilation takes half a minute."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
        cls.prefix = os.path.join(cls.folder, "prefix")
        install(cls.prefix)
        cls.source = os.path.join(cls.folder, "example")
        shutil.copytree(EXAMPLE, cls.source)
        # No other offload is to be found, and none of Bazel's outputs.
        cls.environment = {"PATH": os.environ["PATH"], "HOME": cls.folder}

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def test_the_plug_in_for_gpus_is_beside_the_library_which_looks_for_it_there(self):
        plugin = os.path.join(self.prefix, "lib", "liboffload_cuda.so")
        self.assertIn("offload_cuda_open", call("nm", "--dynamic", "--defined-only", plugin))

    def test_bash_completes_the_installed_tool(self):
        script = os.path.join(self.prefix, "share", "bash-completion", "completions", "offloadctl")
        words = 'source "$1"; COMP_CWORD=1; _offloadctl offloadctl do offloadctl; echo "${COMPREPLY[@]}"'
        self.assertEqual(call("bash", "-c", words, "bash", script), "doctor\n")

    def test_a_trainer_of_ones_own_is_built_with_cmake_and_resumes(self):
        build, pool = os.path.join(self.folder, "build"), os.path.join(self.folder, "pool")
        os.mkdir(pool)
        call("cmake", "-S", self.source, "-B", build, f"-DCMAKE_PREFIX_PATH={self.prefix}", env=self.environment)
        call("cmake", "--build", build, env=self.environment)
        trainer = os.path.join(build, "trainer")
        runs = [losses(call(trainer, pool, env=self.environment)) for _ in range(2)]
        self.assertEqual([line.split()[1] for run in runs for line in run], [str(step) for step in range(1, 11)])

        in_memory = losses(call(trainer, pool, env=self.environment | {"OFFLOADD_DISABLE": "1"}))
        self.assertEqual(runs[0], in_memory)
        jobs = call(os.path.join(self.prefix, "bin", "offloadctl"), "ls", pool, env=self.environment)
        self.assertIn("cmake-example", jobs)

    def test_the_library_shows_its_header_and_nothing_else(self):
        library = os.path.join(self.prefix, "lib", "liboffload.so")
        symbols = call("nm", "--dynamic", "--defined-only", "--extern-only", "--demangle", library).splitlines()
        names = [line.split(maxsplit=2)[2] for line in symbols]
        self.assertTrue(any(name.startswith("offload::Engine::Open(") for name in names), names)
        # The linker shows copies of the C++ library's own inline functions, whatever the script says.
        foreign = [name for name in names if not re.match(r"(p?(read|write)(64)?|p?(read|write)v(64)?(v?2)?|(send|recv)(msg)?|sendto|recvfrom|fread|fwrite|sigaction|signal|pthread_sigmask|sigprocmask)$|std::|.*offload::|torch::optim::\w+::(step|save|load|state)\(|torch::nn::Module::(register_parameter|to)\(|"
                                                            r"torch::serialize::InputArchive::read\(|offload_\w+$", name)]
        self.assertEqual(foreign, [])
        inner = [name for name in names if "zero3::" in name and "NamedOptimizer" not in name]
        self.assertEqual(inner, ["offload::zero3::HomePages::Give(at::Tensor const&)"])  # for liboffload_untouched.so

    def test_pkg_config_names_flags_that_compile_and_link(self):
        environment = self.environment | {"PKG_CONFIG_PATH": os.path.join(self.prefix, "lib", "pkgconfig")}
        flags = call("pkg-config", "--cflags", "--libs", "offload", env=environment).split()
        self.assertIn("-DNDEBUG", flags)
        source = os.path.join(self.folder, "says.cc")
        with open(source, "w", encoding="utf-8") as file:
            # The header of the library without torch's: an Error crosses its border.
            file.write("""#include <offload/grad_scaler.h>
                          #include <offload/torch.h>
                          #include <offload/vertical.h>
                          #include <torch/nn/modules/linear.h>
                          offload::GradScaler ScalerOf(offload::Engine& engine) { return offload::GradScaler(engine); }
                          int main() {
                            torch::nn::Sequential sequence(torch::nn::Linear(2, 2));
                            if (offload::Blocks(sequence).size() != 1) return 8;
                            try { offload::Options options; options.nvme_path = "."; options.ram = "much"; offload::Engine::Open(options); }
                            catch (const offload::Error& error) { return error.id() != 0 ? 7 : 8; }
                            return 9;
                          }""")
        program = os.path.join(self.folder, "says")
        call("g++", "-std=c++17", source, *flags, "-o", program)
        call(program, expect=7, env=self.environment)

    def test_a_program_built_without_offload_is_run_with_it(self):
        pool, saved = os.path.join(self.folder, "plain-pool"), os.path.join(self.folder, "plain.pt")
        os.mkdir(pool)
        in_memory = losses(call(PLAIN, "3", saved, env=self.environment))
        tool = os.path.join(self.prefix, "bin", "offloadctl")
        said = call(tool, "run", "--nvme-path", pool, "--ram", "1GiB", "--job", "plain", "--", PLAIN, "3", saved, env=self.environment)
        self.assertIn("offloadctl run: job plain in ", said)
        self.assertEqual(losses(said), in_memory)
        self.assertEqual(len(in_memory), 3)

    def test_a_program_in_c_trains_resumes_and_thaws(self):
        environment = self.environment | {"PKG_CONFIG_PATH": os.path.join(self.prefix, "lib", "pkgconfig")}
        torch = call("pkg-config", "--variable=torch", "offload", env=environment).strip()
        pool = os.path.join(self.folder, "c-pool")
        os.mkdir(pool)
        program, library = os.path.join(self.folder, "c_trainer"), os.path.join(self.prefix, "lib")
        call("cc", "-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", C_TRAINER, f"-I{self.prefix}/include", f"-L{library}", "-loffload",
             f"-Wl,-rpath,{library}:{torch}/lib", "-Wl,--allow-shlib-undefined", "-o", program)
        self.assertEqual(losses(call(program, pool, env=self.environment)), ["step 3 weight 128 bias 3f80"])
        self.assertEqual(losses(call(program, pool, env=self.environment)), ["step 6 weight 16 bias 3f80"])
        # 1 - 3 * 0.5
        self.assertEqual(losses(call(program, pool, "thaw", env=self.environment)), ["step 9 weight 2 bias bf00"])

    def test_another_torch_is_refused_by_name(self):
        other = os.path.join(self.folder, "libtorch")
        os.makedirs(os.path.join(other, "include", "torch"))
        with open(os.path.join(other, "include", "torch", "version.h"), "w", encoding="utf-8") as file:
            file.write("#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 4\n#define TORCH_VERSION_PATCH 1\n")
        said = call("cmake", "-S", self.source, "-B", os.path.join(self.folder, "refused"),
                    f"-DCMAKE_PREFIX_PATH={self.prefix}", f"-DTORCH_DIR={other}", expect=1, env=self.environment)
        said = " ".join(said.split())
        self.assertIn("offload was built with libtorch 2.11", said)
        self.assertIn("is 2.4: install that release", said)

    def test_the_manual_says_the_release(self):
        with open(os.path.join(self.prefix, "share", "man", "man1", "offloadctl.1"), encoding="utf-8") as file:
            text = file.read()
        release = re.match(r"offloadctl ([0-9.]+)", call(os.path.join(self.prefix, "bin", "offloadctl"), "version")).group(1)
        self.assertIn(f'"offload {release}"', text)

    def test_a_library_without_torch_is_refused(self):
        said = install(os.path.join(self.folder, "elsewhere"), expect=1, library=FILES["daemon"])
        self.assertIn("names no folder with libtorch_cpu.so", said)


if __name__ == "__main__":
    options = ("library", "header", "daemon", "tool", "version-header", "preloaded", "plugin", "header", "header", "header")
    for option, path in zip(options, sys.argv[1:11], strict=True):
        FILES.setdefault(option, []).append(os.path.abspath(path))
    unittest.main(argv=sys.argv[:1])
