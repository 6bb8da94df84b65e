// Unboxed kernels of usual ops: an optional part that spares boxing their calls.
//
// Part of recorder.cpp, which is one translation unit and also builds without this file.

#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/ops/_reshape_alias_ops.h>
#include <ATen/ops/_softmax_backward_data_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/_unsafe_view_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/alias_ops.h>
#include <ATen/ops/as_strided_ops.h>
#include <ATen/ops/bernoulli_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/detach_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_dense_backward_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/empty_like_ops.h>
#include <ATen/ops/expand_ops.h>
#include <ATen/ops/fill_ops.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/hardsigmoid_backward_ops.h>
#include <ATen/ops/hardsigmoid_ops.h>
#include <ATen/ops/hardswish_backward_ops.h>
#include <ATen/ops/hardswish_ops.h>
#include <ATen/ops/lerp_ops.h>
#include <ATen/ops/masked_fill_ops.h>
#include <ATen/ops/max_pool2d_with_indices_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/permute_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/select_ops.h>
#include <ATen/ops/sigmoid_backward_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_backward_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/slice_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/squeeze_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/tanh_backward_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/threshold_backward_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <ATen/ops/unsqueeze_ops.h>
#include <ATen/ops/view_ops.h>
#include <ATen/ops/where_ops.h>
#include <ATen/ops/zero_ops.h>

#include <atomic>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include "call.h"

namespace {

// The trace that records a call of this thread unboxed; null: `fallback` decides.
[[gnu::hot]] Recorder* recorder_of(const Scratch& scratch, const torch::autograd::Node* node) {
  Recorder* on = current.load(std::memory_order_acquire);
  if (!on || scratch.python || (scratch.owner && scratch.owner != on) || on->everything_python) return nullptr;
  if (node ? is_left_to_python(*on, node) : !scratch.owner && scratch.entered != on->trace) return nullptr;
  return on;
}

// Calls `use` with an argument in the form of `Call::add` and `is_default`: lists unchanged, all others as IValues.
template <typename Use, typename T>
decltype(auto) simply(const Use& use, const T& value) {
  if constexpr (std::is_same_v<T, c10::SymIntArrayRef>) {
    if (const auto plain = c10::asIntArrayRefSlowOpt(value)) return use(*plain);
  } else if constexpr (std::is_same_v<T, at::OptionalIntArrayRef>) {
    if (value) return use(*value);
  } else if constexpr (std::is_same_v<T, at::IntArrayRef>) {
    return use(value);
  }
  return use(c10::IValue(value));
}

template <typename Schema>
class Unboxed;

// Unboxed kernel of one op at the recorder's key, with the signature of its C++ function: use counts stay the same, and
// nothing is boxed. Calls that are not recorded here, or are less simple, go to `fallback`. Ops with one signature share
// code, most of which has left the cache at the next call.
template <typename Result, typename... Args>
class Unboxed<Result(Args...)> final : public c10::OperatorKernel {
  template <typename T>
  static constexpr bool kList = std::is_same_v<T, at::TensorList> || std::is_same_v<T, at::ITensorListRef> ||
      std::is_same_v<T, c10::List<std::optional<at::Tensor>>>;
  static_assert(!(kList<std::decay_t<Args>> || ...), "a value made of a list would go before its tensors are named");
  using Redispatch = Result (*)(c10::DispatchKeySet, Args...);
  const c10::OperatorHandle handle;
  const Redispatch redispatch;
  std::atomic<const Op*> known{nullptr};

 public:
  Unboxed(c10::OperatorHandle handle, Redispatch redispatch) : handle(std::move(handle)), redispatch(redispatch) {}

  [[gnu::hot, gnu::always_inline]] inline Result operator()(c10::DispatchKeySet keys, Args... args) {
    Scratch& scratch = this_thread();
    const Op* op = known.load(std::memory_order_acquire);
    if (op) op->fetch();
    const auto node = torch::autograd::get_current_node();
    Recorder* on = op ? recorder_of(scratch, node.get()) : nullptr;
    if (!on) return boxed(keys, std::forward<Args>(args)...);
    Call call{*on, scratch, *op, node != nullptr};
    call.begin();
    add(call, std::index_sequence_for<Args...>(), args...);
    if (!call.end_arguments(node.get())) return boxed(keys, std::forward<Args>(args)...);
    Result result = [&]() -> Result {
      try {
        return redispatch(keys & kAfter, std::forward<Args>(args)...);
      } catch (...) {
        call.failed();
        throw;
      }
    }();
    if constexpr (std::is_same_v<std::decay_t<Result>, at::Tensor>) call.output(result);
    else std::apply([&](const auto&... each) { (call.output(each), ...); }, result);
    call.record();
    return result;
  }

 private:
  template <size_t... position>
  static void add(Call& call, std::index_sequence<position...>, const std::decay_t<Args>&... args) {
    const bool usual[] = {is_usual(call.op.each[position], args)...};
    call.last = call.op.positional;
    while (call.last > 0 && usual[call.last - 1]) call.last--;
    (add(call, position, args), ...);
  }
  template <typename T>
  static bool is_usual(const Argument& argument, const T& value) {
    if constexpr (std::is_same_v<T, at::Tensor>) return false;
    else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) return !value && argument.usual == Argument::kNone;
    else return simply([&](const auto& simple) { return is_default(argument, simple); }, value);
  }
  template <typename T>
  static void add(Call& call, int position, const T& value) {
    if constexpr (std::is_same_v<T, at::Tensor>) call.add_tensor(value, position);
    else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) value ? call.add_tensor(*value, position) : call.add(c10::IValue(), position);
    else simply([&](const auto& simple) { call.add(simple, position); }, value);
  }

  [[gnu::cold, gnu::noinline]] Result boxed(c10::DispatchKeySet keys, Args... args) {
    if (!known.load(std::memory_order_relaxed) && current.load()) {
      const Op* op = op_of(handle);
      const Plan& plan = op->plan;
      const bool other = plan.python || plan.open || plan.statistics || plan.decomposes || !plan.traced;
      if (!other) known.store(op, std::memory_order_release);
    }
    return c10::impl::BoxedKernelWrapper<Result(Args...)>::call(
        c10::BoxedKernel::makeFromFunction<&fallback>(), handle, keys, std::forward<Args>(args)...);
  }
};

}  // namespace

// Boxed calls go to `fallback` directly; torch would unbox them for the kernel, by code per signature.
template <typename Schema>
struct c10::impl::make_boxed_from_unboxed_functor<Unboxed<Schema>, false> {
  static void call(c10::OperatorKernel*, const c10::OperatorHandle& handle, c10::DispatchKeySet keys, c10::Stack* stack) {
    fallback(handle, keys, stack);
  }
};

// As torch's own, but placed beside its callees: the linker groups functions marked hot, so a call touches few pages.
template <typename Schema, typename Result, typename... Args>
struct c10::impl::wrap_kernel_functor_unboxed_<Unboxed<Schema>, Result(c10::DispatchKeySet, Args...)> {
  [[gnu::hot]] static Result call(c10::OperatorKernel* kernel, c10::DispatchKeySet keys, Args... args) {
    return (*static_cast<Unboxed<Schema>*>(kernel))(keys, std::forward<Args>(args)...);
  }
};

namespace {

template <typename Of>
void register_unboxed() {
  using Kernel = Unboxed<typename Of::schema>;
  auto& dispatcher = c10::Dispatcher::singleton();
  auto kernel = std::make_unique<Kernel>(dispatcher.findSchemaOrThrow(Of::name, Of::overload_name), &Of::redispatch);
  keep(dispatcher.registerImpl({Of::name, Of::overload_name}, kKey, c10::KernelFunction::makeFromUnboxedFunctor<false, Kernel>(std::move(kernel)),
                               c10::impl::CppSignature::make<typename Of::schema>(), nullptr, __FILE__));
}

template <typename... Of>
void register_each() {
  (register_unboxed<Of>(), ...);
}

// Ops whose kernels often take no longer than boxing the call. Each needs its header above.
void register_usual() {
  register_each<
      at::_ops::_reshape_alias, at::_ops::_softmax, at::_ops::_softmax_backward_data, at::_ops::_unsafe_view,
      at::_ops::add_Tensor, at::_ops::add__Tensor, at::_ops::addcdiv_, at::_ops::addcmul_, at::_ops::addmm,
      at::_ops::alias, at::_ops::as_strided, at::_ops::bernoulli__float, at::_ops::bmm, at::_ops::clone,
      at::_ops::copy_, at::_ops::detach, at::_ops::div_Scalar, at::_ops::div_Tensor, at::_ops::div__Scalar,
      at::_ops::div__Tensor, at::_ops::embedding, at::_ops::embedding_dense_backward, at::_ops::empty_like,
      at::_ops::expand, at::_ops::fill__Scalar, at::_ops::gelu, at::_ops::gelu_backward, at::_ops::hardsigmoid,
      at::_ops::hardsigmoid_backward, at::_ops::hardswish, at::_ops::hardswish_, at::_ops::hardswish_backward,
      at::_ops::lerp__Scalar, at::_ops::masked_fill_Scalar, at::_ops::max_pool2d_with_indices, at::_ops::mean_dim,
      at::_ops::mm, at::_ops::mul_Scalar, at::_ops::mul_Tensor, at::_ops::mul__Tensor, at::_ops::native_layer_norm,
      at::_ops::native_layer_norm_backward, at::_ops::neg, at::_ops::permute, at::_ops::pow_Tensor_Scalar,
      at::_ops::relu, at::_ops::relu_, at::_ops::rsqrt, at::_ops::select_int, at::_ops::sigmoid,
      at::_ops::sigmoid_backward, at::_ops::silu, at::_ops::silu_backward, at::_ops::slice_Tensor, at::_ops::sqrt,
      at::_ops::squeeze_dim, at::_ops::sub_Tensor, at::_ops::sum_dim_IntList, at::_ops::t, at::_ops::tanh,
      at::_ops::tanh_backward, at::_ops::threshold_backward, at::_ops::transpose_int, at::_ops::unsqueeze,
      at::_ops::view, at::_ops::where_self, at::_ops::zero_>();
}

}  // namespace
