// Calls that are forwarded to Python, which makes them by the op `hashbench::make`.
//
// Part of recorder.cpp, which is one translation unit.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "arguments.h"
#include "digest.h"
#include "thread.h"

namespace {

// Modes (up to torch 2.14) and tensor subclasses of a forwarded call. For these torch looks up a kernel that was registered from
// Python by operator name (`python_op_registration_trampoline`), which finds no fallback: they are hidden while Python runs, and
// visible again for the kernel.
struct PythonDispatch {
  using Modes = c10::impl::TorchDispatchModeTLS;
  const bool any = Modes::any_modes_set();
  Modes modes;                       // the other state, while `any`
  std::vector<at::Tensor> subclass;  // arguments

  bool empty() const { return !any && subclass.empty(); }
  void swap(bool visible) {
    for (const at::Tensor& tensor : subclass) tensor.unsafeGetTensorImpl()->set_python_dispatch(visible);
    if (!any) return;
    Modes current = Modes::get_state();
    Modes::set_state(std::exchange(modes, std::move(current)));
  }
};

// Scope in which what dispatches to Python is hidden, or visible again.
struct Swapped {
  PythonDispatch& dispatch;
  const bool visible;
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();  // `set_state` changes them

  Swapped(PythonDispatch& dispatch, bool visible) : dispatch(dispatch), visible(visible) {
    if (!dispatch.empty()) dispatch.swap(visible);
  }
  Swapped(const Swapped&) = delete;
  ~Swapped() {
    if (dispatch.empty()) return;
    dispatch.swap(!visible);
    c10::impl::_force_tls_local_dispatch_key_set(keys);
  }
};

// A call forwarded to Python. Python receives aliases of plain tensors: a Python object of the tensor, or of its storage,
// would raise its use count, on which autograd branches later.
struct Handed {
  Recorder& recorder;
  const Op& op;
  const c10::OperatorHandle& handle;
  c10::DispatchKeySet keys;
  c10::Stack* stack;
  c10::impl::LocalDispatchKeySet entry;  // the thread's keys when the call arrived
  PythonDispatch dispatch;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;  // original, alias
  std::vector<std::pair<c10::Storage, c10::Storage>> storages;
};

c10::Storage shown(Handed& call, const c10::Storage& storage) {
  for (const auto& [original, copy] : call.storages)
    if (original.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return copy;
  // The alias owns the memory, so that Python's references stay valid.
  auto owner = std::make_unique<c10::Storage>(storage);
  c10::DataPtr memory(storage.data_ptr().get(), owner.get(), [](void* kept) { delete static_cast<c10::Storage*>(kept); },
                      storage.device());
  owner.release();
  c10::Storage copy(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                          std::move(memory), nullptr, false));
  call.storages.emplace_back(storage, copy);
  return copy;
}

at::Tensor shown(Recorder& recorder, Handed& call, const at::Tensor& tensor, bool output = false) {
  if (!tensor.defined() || call.op.plan.originals || !is_plain(recorder, tensor) || is_number(tensor)) return tensor;
  for (const auto& [original, copy] : call.tensors)
    if (original.is_same(tensor)) return copy;
  if (!recorder.nothing_recorded) {
    c10::StorageImpl* storage = storage_of(tensor);
    Guard guard(recorder.lock);
    const auto* entry = recorder.writers.find(storage);
    const bool whole = output || (tensor.nbytes() >= storage->nbytes() && tensor.is_contiguous());
    if (entry ? entry->python : !whole) return tensor;  // Python's state is an attribute of the storage
  }
  at::Tensor copy = at::detail::make_tensor<c10::TensorImpl>(shown(call, tensor.storage()), tensor.key_set(), tensor.dtype());
  copy.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  call.tensors.emplace_back(tensor, copy);
  return copy;
}

c10::IValue shown(Recorder& recorder, Handed& call, const c10::IValue& value, bool output = false) {
  if (value.isTensor()) return shown(recorder, call, value.toTensor(), output);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(shown(recorder, call, tensor, output));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<at::Tensor>(shown(recorder, call, *tensor)) : std::nullopt);
    return list;
  }
  return value;
}

// The op `hashbench::make`, by which Python makes the forwarded call: a separate op, so that no other call (of a signal
// handler) is mistaken for it. It returns aliases of the outputs.
void make(const c10::OperatorHandle&, c10::DispatchKeySet, c10::Stack* stack) {
  TORCH_CHECK(this_thread().handed, "hashbench::make is called where no call was handed over");
  Handed& call = *this_thread().handed;
  {
    const Swapped visible(call.dispatch, true);
    const InProgram kernel(call.entry);
    call.handle.redispatchBoxed(call.keys & kAfter, call.stack);
  }
  for (auto& [original, copy] : call.tensors) {  // an `out` was resized
    c10::StorageImpl* storage = storage_of(original);
    c10::StorageImpl* other = storage_of(copy);
    if (storage->data_ptr().get() != other->data_ptr().get() || storage->nbytes() != other->nbytes()) {
      std::erase_if(call.storages, [&](const auto& pair) { return pair.second.unsafeGetStorageImpl() == other; });
      copy.unsafeGetTensorImpl()->set_storage_keep_dtype(shown(call, original.storage()));
    }
    if (copy.sizes() != original.sizes() || copy.strides() != original.strides())
      copy.unsafeGetTensorImpl()->set_sizes_and_strides(original.sizes(), original.strides(), original.storage_offset());
  }
  std::vector<c10::IValue> outputs;
  for (size_t i = call.stack->size() - static_cast<size_t>(call.op.returns); i < call.stack->size(); i++) {
    const c10::IValue& value = (*call.stack)[i];
    const bool none = value.isTensor() && !value.toTensor().defined();  // not allowed in a tuple
    outputs.push_back(none ? c10::IValue() : shown(call.recorder, call, value, true));
  }
  if (outputs.empty()) stack->emplace_back();
  else if (outputs.size() == 1) stack->push_back(std::move(outputs[0]));
  else stack->emplace_back(c10::ivalue::Tuple::create(std::move(outputs)));
}

// True if a value is, or contains, a tensor without data, or names the meta device: a placeholder. With modes disabled, a
// fake tensor is recognized by its device alone.
bool has_no_content(const c10::IValue& value, bool modes_off) {
  if (value.isDevice()) return modes_off && value.toDevice().is_meta();
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return false;
    if (modes_off && tensor.is_meta()) return true;
    return tensor.key_set().has(c10::DispatchKey::Python) && !ask(has_data, 1, tensor);
  }
  if (!value.isList() || value.isIntList() || value.isDoubleList() || value.isBoolList()) return false;
  const auto items = value.toListRef();
  return std::any_of(items.begin(), items.end(), [&](const c10::IValue& item) { return has_no_content(item, modes_off); });
}

// True if Python inspects a value without calling an op. If a call has only such values, ops that arrive during its callback
// are the program's; ops of our Python code run in `unrecorded` (hashbench/core/native/library.py).
bool is_plain(const Recorder& recorder, const c10::IValue& value) {
  if (value.isTensor()) return !value.toTensor().defined() || is_number(value.toTensor()) || is_plain(recorder, value.toTensor());
  if (value.isDevice()) return value.toDevice().is_cpu();
  if (value.isGenerator()) return value.toGenerator().device().is_cpu();
  if (!value.isList()) return !value.isObject();
  const auto items = value.toListRef();
  return std::all_of(items.begin(), items.end(), [&](const c10::IValue& item) { return is_plain(recorder, item); });
}

void add_subclass(PythonDispatch& dispatch, const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python)) dispatch.subclass.push_back(tensor);
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& item : value.toListRef()) add_subclass(dispatch, item);
  }
}

// Calls Python with every key above the kernel excluded; Python calls `make`.
void record_in_python(Recorder& recorder, const Op& op, const c10::OperatorHandle& handle, c10::DispatchKeySet keys, c10::Stack* stack) {
  const bool modes_off = c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::Python);
  {
    Quiet quiet;
    const auto is_later = [&](const c10::IValue& value) { return has_no_content(value, modes_off); };
    if (std::any_of(stack->end() - op.arguments, stack->end(), is_later)) {
      handle.redispatchBoxed(keys & kAfter, stack);
      return;
    }
  }
  const auto arrived = stack->end() - op.arguments;
  const bool calls_no_op = !op.plan.python &&
      std::all_of(arrived, stack->end(), [&](const c10::IValue& value) { return is_plain(recorder, value); });
  Ended ended;
  Handed call{recorder, op, handle, keys, stack, c10::impl::tls_local_dispatch_key_set(), {}, {}, {}};
  if (!op.plan.open) call.entry.included_ = call.entry.included_.remove(kKey);
  c10::Stack arguments;
  for (size_t i = stack->size() - static_cast<size_t>(op.arguments); i < stack->size(); i++) {
    add_subclass(call.dispatch, (*stack)[i]);
    arguments.push_back(shown(recorder, call, (*stack)[i]));
  }
  Scratch& scratch = this_thread();
  const InPython looking(false);
  Handed* outer = std::exchange(scratch.handed, &call);
  const auto children = scratch.children.size(), lanes = scratch.lanes.size();
  const auto opened = scratch.open;
  try {
    const Swapped hidden(call.dispatch, false);
    c10::impl::ExcludeDispatchKeyGuard quiet(calls_no_op ? kNotAfter.remove(kKey) : kNotAfter);
    handle.redispatchBoxed((keys & kAfter) | c10::DispatchKeySet(kPythonKey), &arguments);
  } catch (...) {
    scratch.handed = outer;
    scratch.open = opened;
    scratch.children.resize(children);
    scratch.lanes.resize(lanes);
    recorder.failed = op.id;
    throw;
  }
  scratch.handed = outer;
}

}  // namespace
