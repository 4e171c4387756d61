"""Tests that the documents say what the tree says."""

import os
import re
import sys
import textwrap
import unittest

# Runfiles are links to the tree: following one leads to its root.
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
sys.dont_write_bytecode = True

import errors_page  # noqa: E402  (needs the path above)
import layer_check  # noqa: E402

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def documents():
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if not f.startswith((".", "bazel-")) and f != "build"]
        for name in files:
            if name.endswith(".md"):
                yield os.path.relpath(os.path.join(folder, name), ROOT)


class DocumentsTest(unittest.TestCase):
    def test_the_page_of_errors_is_made_from_the_registry(self):
        self.assertTrue(errors_page.is_current(), "run python3 tools/errors_page.py")

    def test_a_line_of_the_registry_that_cannot_be_read_is_refused(self):
        with self.assertRaises(ValueError):
            errors_page.page_of("OFFLOAD_ERROR(1001, kUnknownFlag)\n")

    def test_the_attach_of_the_readme_is_the_example_that_is_built(self):
        program = read("examples/attach_example.cc")
        shown = program.split("// README.md shows from here\n")[1].split("  // to here\n")[0]
        self.assertIn("```cpp\n#include <offload/torch.h>\n\n" + textwrap.dedent(shown) + "```\n", read("README.md"))

    def test_the_table_of_variables_has_those_that_are_read(self):
        code = read("base/environment.cc").split("// Of tests and tools.")[0]
        table = read("docs/operate.md").split("\n## Environment\n")[1].split("\n## ")[0]
        rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
        read_ones, told = (sorted(re.findall(r"OFFLOAD(?:D|CTL)_[A-Z_]+", text)) for text in (code, " ".join(rows)))
        self.assertGreater(len(read_ones), 20)
        self.assertEqual(read_ones, told)

    def test_the_maps_have_every_folder_of_the_code(self):
        folders = {layer.split("/")[0] for layer in layer_check.ARROWS} | {"packaging", "python"}
        self.assertEqual(set(re.findall(r"^\| \[(\w+)\]\(\1\) \|", read("README.md"), re.MULTILINE)), folders)
        shown = read("ARCHITECTURE.md").split("```")[1]
        self.assertEqual(set(re.findall(r"(?:^| {3,})(\w+)/ ", shown, re.MULTILINE)), folders)

    def test_the_hops_of_the_architecture_are_functions_of_their_files(self):
        hops = re.split(r"^\d\. ", read("ARCHITECTURE.md").split("## Four hops to a sector")[1], flags=re.MULTILINE)[1:]
        self.assertEqual(len(hops), 4)
        for hop in hops:
            code = "".join(map(read, re.findall(r"\]\(([\w/]+\.cc)\)", hop)))
            functions = [name.split("::")[-1] for name in re.findall(r"`([\w:]+)`", hop)]
            self.assertTrue(any(f"::{name}(" in code for name in functions), hop)

    def test_links_lead_to_files_of_the_tree(self):
        seen = 0
        for document in documents():
            for target in LINK.findall(FENCED.sub("", read(document))):
                if "://" in target:
                    continue
                seen += 1
                path = os.path.join(ROOT, os.path.dirname(document), target)
                self.assertTrue(os.path.exists(path), f"{document}: {target}")
        self.assertGreater(seen, 10)


if __name__ == "__main__":
    unittest.main()
