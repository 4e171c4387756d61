// What tests without torch are compiled with: cc.bzl.
#include <gtest/gtest.h>

#include "third_party/precompiled/common.h"
