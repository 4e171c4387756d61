// kernels/optimizer.h
//
// What an optimizer is, as data: its parameters, the planes that it keeps beside the master, and
// how often it sweeps over a tensor. Everybody who has to know (catalogue, planner, residency, ring
// validation, transfers, update, Gather, control messages) asks here, so that nobody else names an
// optimizer. The rows are listed in kernels/rules/rules.h; the arithmetic is in update.h.
//
// Adding an optimizer whose update is element by element: its rule (kernels/rules/<name>.h and .cc:
// row, vector step, scalar reference), one line in rules.h, and a public name in zero3/torch.
//
// Thread safety: rows are constants; an OptimizerSpec is a value.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/averaging.h"

namespace offload::kernels {

inline constexpr size_t kParametersMax = 12;
// Values that an optimizer keeps per element, at most: fp32, of fp64 models fp64.
inline constexpr size_t kStatePlanesMax = 3;

enum class Range : uint8_t {
  kFinite,
  kNotNegative,
  // Finite, of a new optimizer only (torch lets options be changed to anything later):
  kRate,      // not negative
  kFraction,  // 0 ≤ value < 1
  kFlag,      // 0 or 1
  kFlavour,   // an AdamWFlavour
};

struct Parameter {
  const char* name;  // as torch calls it
  double initial;
  Range range;
};

// Its place in the row is its number in every store, in shared memory and in Run::state.
struct StatePlane {
  const char* name;                  // as torch.optim calls it
  const char* other_name = nullptr;  // that Gather accepts, too
  int kept_if = -1;                  // index of a parameter: kept only where that is not 0
};

// The constants of one update in fp32, or fp64, as the optimizer's rule lays them out.
struct Coefficients {
  alignas(16) unsigned char bytes[112];
};

struct Optimizer {
  const char* name;  // in messages, catalogues and error texts
  std::span<const Parameter> parameters;
  std::span<const StatePlane> planes;
  // Why values of a new optimizer that are each within their range do not fit together; null when
  // they do.
  const char* (*conflict)(const double* values);
  // Compute the constants of a tensor's update number `step` (1: its first) in double, as torch
  // does, and round them once: to fp32, or not at all.
  void (*prepare)(const double* values, int64_t step, Coefficients* coefficients);
  void (*prepare_double)(const double* values, int64_t step, Coefficients* coefficients);
  // Whether these values follow somebody who takes the roots of a vector library
  // (kernels/square_root.h). Null: none do.
  bool (*takes_library_roots)(const double* values) = nullptr;
};

// An optimizer, the values of its parameters, and whether an average of the masters is kept beside
// them: one more plane, whatever the optimizer (kernels/average.h).
class OptimizerSpec {
 public:
  // AdamW with its defaults.
  OptimizerSpec();
  // `name` must be one of OptimizerNames(), and the parameters its own: what comes from outside
  // goes through Find().
  explicit OptimizerSpec(std::string_view name,
                         std::initializer_list<std::pair<std::string_view, double>> values = {});
  // Fills in a spec from a message. Returns what is wrong with it, or nothing.
  static std::string Read(std::string_view name, std::span<const double> values,
                          OptimizerSpec* spec);

  const Optimizer& row() const;
  std::string_view name() const { return row().name; }
  size_t index() const { return index_; }  // of the row in the table
  std::span<const double> values() const { return {values_.data(), row().parameters.size()}; }
  double Get(std::string_view parameter) const;
  OptimizerSpec& Set(std::string_view parameter, double value);

  const Averaging& averaging() const { return averaging_; }
  void SetAveraging(const Averaging& averaging) { averaging_ = averaging; }

  // Why these values cannot be ("sgd with lr nan, which has to be …"), or nothing.
  std::string Violation() const;
  // The same of a new optimizer, of which torch demands more: no negative lr, betas below 1.
  std::string ViolationWhenNew() const;
  // The plane of that number, null when this optimizer with these values does not keep it.
  const StatePlane* Plane(size_t number) const;
  bool KeepsAnything() const;
  bool TakesLibraryRoots() const;
  // From here on this keeps what `other`, with other values of the same optimizer, keeps, too; the
  // average is left out.
  void KeepToo(const OptimizerSpec& other);

 private:
  uint8_t index_ = 0;
  std::array<double, kParametersMax> values_{};
  Averaging averaging_;
};

// Of the whole table, in its order.
std::span<const std::string_view> OptimizerNames();

}  // namespace offload::kernels
