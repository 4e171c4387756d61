// What tests that include torch are compiled with, most of which have modules: precompiled.bzl.
#include <torch/torch.h>
