"""Stands in for rules_cc: the rules that Bazel itself provides, under the names that other rule sets load."""

def _rule(name):
    return getattr(native, name, None)

cc_library = _rule("cc_library")
cc_binary = _rule("cc_binary")
cc_test = _rule("cc_test")
cc_import = _rule("cc_import")
cc_proto_library = _rule("cc_proto_library")
cc_toolchain = _rule("cc_toolchain")
cc_toolchain_suite = _rule("cc_toolchain_suite")
cc_toolchain_alias = _rule("cc_toolchain_alias")
cc_libc_top_alias = _rule("cc_libc_top_alias")
cc_shared_library = _rule("cc_shared_library")
fdo_prefetch_hints = _rule("fdo_prefetch_hints")
fdo_profile = _rule("fdo_profile")
objc_library = _rule("objc_library")
objc_import = _rule("objc_import")
