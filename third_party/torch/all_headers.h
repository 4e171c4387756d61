// What files that include torch are compiled with: precompiled.bzl.
#include <torch/torch.h>
