#include "offloadd/agreement.h"

#include <google/protobuf/util/message_differencer.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "kernels/optimizer.h"

namespace offload::daemon {
namespace {

absl::Status Difference(const std::string& what) { return MakeError(ErrorId::kRanksDiffer, what); }

const char* ShortName(proto::Dtype dtype) {
  switch (dtype) {
    case proto::Dtype::kFloat32:
      return "fp32";
    case proto::Dtype::kBFloat16:
      return "bf16";
    case proto::Dtype::kFloat16:
      return "fp16";
    case proto::Dtype::kFloat64:
      break;
  }
  return "fp64";
}

std::string Describe(const proto::Tensor& tensor) {
  return absl::StrCat(ShortName(tensor.dtype), " of shape [", absl::StrJoin(tensor.shape, ", "),
                      "], ", tensor.trainable ? "trainable" : "frozen",
                      tensor.dimension_order.empty() ? "" : ", dimensions in memory in the order ",
                      absl::StrJoin(tensor.dimension_order, ", "));
}

// The messages of one stream as one: lists are continued.
proto::v1::SealRequest Join(const std::vector<proto::v1::SealRequest>& messages) {
  proto::v1::SealRequest joined;
  for (const proto::v1::SealRequest& message : messages) joined.MergeFrom(message);
  return joined;
}

// The name comes from outside.
std::string ParameterName(const std::string& optimizer, size_t index) {
  for (const std::string_view name : kernels::OptimizerNames()) {
    if (name != optimizer) continue;
    const kernels::OptimizerSpec spec(name);
    if (index < spec.row().parameters.size()) return spec.row().parameters[index].name;
  }
  return absl::StrCat("parameter ", index);
}

// As short as tells it from every other number.
std::string Shortest(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}

}  // namespace

absl::Status CompareTensors(OfRank<std::vector<proto::Tensor>> a,
                            OfRank<std::vector<proto::Tensor>> b) {
  for (size_t i = 0; i < std::min(a.said.size(), b.said.size()); ++i) {
    const proto::Tensor& tensor = a.said[i];
    const proto::Tensor& other = b.said[i];
    if (tensor.name != other.name) {
      return Difference(absl::StrCat("tensor ", i, " is \"", tensor.name, "\" in rank ", a.rank,
                                     " and \"", other.name, "\" in rank ", b.rank));
    }
    if (tensor.shape == other.shape && tensor.dtype == other.dtype &&
        tensor.trainable == other.trainable && tensor.dimension_order == other.dimension_order)
      continue;
    return Difference(absl::StrCat("\"", tensor.name, "\" is ", Describe(tensor), " in rank ",
                                   a.rank, " and ", Describe(other), " in rank ", b.rank));
  }
  if (a.said.size() == b.said.size()) return absl::OkStatus();
  return Difference(absl::StrCat("the model has ", a.said.size(), " tensors in rank ", a.rank,
                                 " and ", b.said.size(), " in rank ", b.rank));
}

std::string DifferenceOf(OfRank<proto::v1::Optimizer> a, OfRank<proto::v1::Optimizer> b) {
  // Equal bytes are equal numbers.
  if (a.said.SerializeAsString() == b.said.SerializeAsString()) return "";
  const auto between = [&](const std::string& name, const std::string& one,
                           const std::string& other) {
    return absl::StrCat(name, " is ", one, " in rank ", a.rank, " and ", other, " in rank ",
                        b.rank);
  };
  if (a.said.name() != b.said.name()) return between("optimizer", a.said.name(), b.said.name());
  const int count = a.said.parameters_size();
  if (count != b.said.parameters_size()) {
    return between(absl::StrCat("the number of parameters of ", a.said.name()), absl::StrCat(count),
                   absl::StrCat(b.said.parameters_size()));
  }
  for (int i = 0; i < count; ++i) {
    const double value = a.said.parameters(i), other = b.said.parameters(i);
    if (std::bit_cast<uint64_t>(value) != std::bit_cast<uint64_t>(other))
      return between(ParameterName(a.said.name(), i), Shortest(value), Shortest(other));
  }
  const auto average = [](const proto::v1::Optimizer& said) {
    return said.average().empty() ? "none" : said.average();
  };
  if (a.said.average() != b.said.average())
    return between("average", average(a.said), average(b.said));
  return absl::StrCat("the optimizer is another one in rank ", a.rank, " than in rank ", b.rank);
}

absl::Status ComparePlans(OfRank<std::vector<proto::v1::SealRequest>> a,
                          OfRank<std::vector<proto::v1::SealRequest>> b) {
  const proto::v1::SealRequest plan = Join(a.said), other = Join(b.said);
  if (plan.SerializeAsString() == other.SerializeAsString()) return absl::OkStatus();
  const std::string optimizer =
      DifferenceOf({a.rank, plan.optimizer()}, {b.rank, other.optimizer()});
  if (!optimizer.empty()) return Difference(absl::StrCat("the optimizer: ", optimizer));
  std::string differences;
  google::protobuf::util::MessageDifferencer differencer;
  differencer.ReportDifferencesToString(&differences);
  differencer.Compare(plan, other);
  const std::string first = differences.substr(0, differences.find('\n'));
  return Difference(absl::StrCat("the plan of memory differs between ranks ", a.rank, " and ",
                                 b.rank, ": ", first));
}

}  // namespace offload::daemon
