// What tests that include torch are compiled with, most of which have modules: cc.bzl.
#include <torch/torch.h>
