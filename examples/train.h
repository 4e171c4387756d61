// examples/train.h
//
// The example trainer as a function, for programs that bring a device of their own
// (tests/train_on_standin_torch.cc).
//
// Thread safety: call once.
#pragma once

namespace offload::examples {

// Trains as the command line says, and returns the exit code: 0, 1 when it failed, 2 for a command
// line that cannot be understood. Writes to stdout and stderr.
int TrainMain(int argc, char** argv);

}  // namespace offload::examples
