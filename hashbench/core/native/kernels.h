// Calls that are not dispatched, recorded like those that are: of generated kernels, which Python makes, and of the
// allocators of generated modules.
//
// Part of recorder.cpp, which is one translation unit.

#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "call.h"

namespace {

// Tensors of Python's, which outlive the call: their use counts stay the same.
struct Borrowed {
  std::vector<at::Tensor> all;

  void add(int64_t tensor) {
    all.emplace_back(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(reinterpret_cast<c10::TensorImpl*>(tensor)));
  }
  ~Borrowed() {
    for (at::Tensor& tensor : all) tensor.unsafeReleaseTensorImpl();
  }
};

// A call of a generated kernel that Python makes during the life of this object, without garbage collection.
struct KernelCall {
  const bool collects = PyGC_Disable(), seen = keys_here().included().has(kKey);
  const decltype(torch::autograd::get_current_node()) node = torch::autograd::get_current_node();
  Borrowed tensors;
  std::unique_ptr<Call> call;

  KernelCall() = default;
  KernelCall(const KernelCall&) = delete;
  // False if Python must record the call. `values`: addresses of tensors, and numbers.
  bool begin(Recorder& recorder, const Op& op, const int64_t* values) {
    call = std::make_unique<Call>(recorder, this_thread(), op, node != nullptr);
    tensors.all.reserve(static_cast<size_t>(op.arguments));  // they stay in place
    call->last = op.positional;
    call->begin();
    for (int position = 0; call->plain && position < op.arguments; position++) {
      if (op.each[position].lists) {
        call->add(c10::IValue(values[position]), position);
      } else {
        tensors.add(values[position]);
        call->add(tensors.all.back(), position);
      }
    }
    return call->end_arguments(node.get());
  }
  ~KernelCall() {
    call.reset();
    set_seen(seen);
    if (collects) PyGC_Enable();
  }
};

// Adds memory that an allocator has made, with its arguments as they are seen in it.
bool add_allocation(Recorder& recorder, const Op& op, const at::Tensor& tensor) {
  if (!is_plain(recorder, tensor)) return false;
  const auto node = torch::autograd::get_current_node();
  Call call{recorder, this_thread(), op, node != nullptr};
  call.last = op.positional;
  call.begin();
  call.add(tensor.sizes(), 0);
  call.add(tensor.strides(), 1);
  call.add(c10::IValue(static_cast<int64_t>(tensor.scalar_type())), 2);
  if (!call.end_arguments(node.get())) return false;
  call.output(tensor);
  call.record();
  return true;
}

}  // namespace
