// kernels/rules/rules.h
//
// The table of optimizers: one line each. A rule is a type with
//   kRow                      name, parameters, planes, checks, constants (kernels/optimizer.h)
//   ConstantsOf<T>            what kRow.prepare fills in for float, kRow.prepare_double for double;
//                             at most a Coefficients long
//   Reference<T>(c, run)      the scalar definition, in float or double
//   Step<V, kInTail>          the same for one vector (kernels/vector_run.h)
//   kHasTail                  whether a tensor's last elements may round differently; then
//   TailBegin(c, run)         says how many elements of the run lie before them
// and, where an update depends on norms of its tensor, so that there are two sweeps,
//   ReferenceNorms<T>(c, run, norms), Terms<V>   the first of them, which changes nothing
// The order is nobody's business outside this library: stores and messages name optimizers.
#pragma once

#include <cstddef>

#include "kernels/rules/adagrad.h"
#include "kernels/rules/adam.h"
#include "kernels/rules/adamw.h"
#include "kernels/rules/lamb.h"
#include "kernels/rules/lion.h"
#include "kernels/rules/rmsprop.h"
#include "kernels/rules/sgd.h"

namespace offload::kernels {

template <class... Rule>
struct RuleList {
  static constexpr size_t kCount = sizeof...(Rule);
};

using Rules = RuleList<rules::AdamW,    //
                       rules::Sgd,      //
                       rules::Adam,     //
                       rules::Adagrad,  //
                       rules::RmsProp,  //
                       rules::Lion, rules::Lamb>;
inline constexpr size_t kOptimizerCount = Rules::kCount;

}  // namespace offload::kernels
