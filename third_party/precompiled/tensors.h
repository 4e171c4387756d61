// What the libraries that include torch are compiled with: cc.bzl. No modules: each
// template that their inline functions use would be instantiated in every file, which takes longer
// than to parse them where they are needed.
#include <torch/types.h>
