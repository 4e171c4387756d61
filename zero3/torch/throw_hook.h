// zero3/torch/throw_hook.h
//
// Lets a language that has exceptions of its own throw these instead of offload::Error.
//
// Thread safety: SetThrowHook before the first engine; hooks are called on any thread.
#pragma once

#include <string>

namespace offload::zero3 {

// Throws an exception with the text, or returns: then offload::Error is thrown.
using ThrowHook = void (*)(const std::string& text);
void SetThrowHook(ThrowHook hook);

}  // namespace offload::zero3
