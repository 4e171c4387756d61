// zero3/torch/device_move.h
//
// What Options::device asks for: tensors of the host become tensors of a device. They stay the same
// tensors (TensorImpl, gradient, hooks), so that optimizers that have them go on with them, as
// beside module->to().
//
// Thread safety: none; when no operation uses the tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <torch/nn/module.h>

#include <optional>
#include <span>
#include <string>

namespace offload::zero3 {

// The device that Options::device names, with its number; none for "" and for the host. Throws
// OFD-1002 for a text that names none, 1601 for one that nothing here drives, 2001 when torch's
// part for it is not in this program.
std::optional<c10::Device> DestinationOf(const std::string& text);

// All tensors that are to move and share one storage of the host, the last of them all of it: they
// share one of `device` from now on, which has no bytes until it is managed. Returns the one that
// has the values. Their gradients are copied there.
c10::Storage MoveWithoutBytes(std::span<const at::Tensor> tensors, c10::Device device);
// Takes that back. Nothing for a storage that is managed, whose bytes nobody brings any more.
void MoveBack(std::span<const at::Tensor> tensors, const c10::Storage& values);

// A tensor of the host, with its bytes; others stay where they are.
void MoveWithBytes(const at::Tensor& tensor, c10::Device device);
// All of a module, as its to() does it; but parameters that share memory go on to share it.
void MoveWithBytes(torch::nn::Module& module, c10::Device device);

}  // namespace offload::zero3
