// As weights_writer, a rank without torch: a job whose weights all have one value, which puts
// replace by the next again and again, until it is killed. Says on stdout, a JSON line each, what
// it found, began and ended.
//
// usage: puts_writer POOL JOB loads|edits|looks FOLDER
//
//   loads  puts of all tensors, and the end of a load
//   edits  puts of all tensors, and a step
//   looks  says what it finds, and ends
//
// Exit code 3: the weights that were found are not of one value. 1: an error, on stderr.

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "tests/spine_fixture.h"

namespace offload {
namespace {

constexpr int kValues = 8;

class Writer {
 public:
  Writer(const std::string& pool, const std::string& name, std::string mode)
      : mode_(std::move(mode)), job_(pool, name, {.dtype = Dtype::kFloat32}) {}

  int Run() {
    job_.Open();
    if (testing::Test::HasFatalFailure()) return 1;
    step_ = job_.info().step;
    if (!job_.info().exists && !(PutAll(0) && Succeeded(job_.session().EndLoad()))) return 1;
    const std::optional<int> found = Value();
    if (!found.has_value()) return 3;
    Say("found", *found);
    for (int value = *found; mode_ != "looks";) {
      value = (value + 1) % kValues;
      Say("begin", value);
      if (!PutAll(static_cast<float>(value))) return 1;
      if (!Succeeded(mode_ == "loads" ? job_.session().EndLoad() : Step())) return 1;
      Say("end", value);
    }
    return 0;
  }

 private:
  static bool Succeeded(const absl::Status& status) {
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return status.ok();
  }

  void Say(const char* event, int value) const {
    std::printf("{\"event\": \"%s\", \"value\": %d, \"step\": %llu}\n", event, value,
                static_cast<unsigned long long>(step_));
    std::fflush(stdout);
  }

  // Calls `transfer` for each extent of each tensor; its buffer is the staging of the region.
  template <typename Transfer>
  bool ForEachExtent(const Transfer& transfer) {
    const auto& tensors = job_.catalogue().tensors;
    for (uint32_t tensor = 0; tensor < tensors.size(); ++tensor) {
      const uint64_t count = tensors[tensor].element_count;
      for (uint64_t begin = 0; begin < count; begin += proto::kExtentElements) {
        if (!transfer(tensor, begin, std::min<uint64_t>(proto::kExtentElements, count - begin)))
          return false;
      }
    }
    return true;
  }
  float* staging() {
    return reinterpret_cast<float*>(job_.session().region() + proto::kRegionFixedBytes);
  }

  bool PutAll(float value) {
    return ForEachExtent([&](uint32_t tensor, uint64_t begin, uint64_t count) {
      std::fill(staging(), staging() + count, value);
      client::Session& session = job_.session();
      return Succeeded(session.Wait(session.Put(tensor, begin, count, proto::kRegionFixedBytes)));
    });
  }

  // That all weights have; none when they differ.
  std::optional<int> Value() {
    std::optional<float> value;
    bool same = true;
    const bool read = ForEachExtent([&](uint32_t tensor, uint64_t begin, uint64_t count) {
      client::Session& session = job_.session();
      if (!Succeeded(session.Wait(
              session.Get(tensor, proto::Plane::kWeight, begin, count, proto::kRegionFixedBytes))))
        return false;
      if (!value.has_value()) value = *staging();
      const auto other =
          std::find_if(staging(), staging() + count, [&](float found) { return found != *value; });
      if (other == staging() + count) return true;
      std::fprintf(stderr, "tensor %u from %llu on has %g, the first one %g\n", tensor,
                   static_cast<unsigned long long>(begin), *other, *value);
      same = false;
      return true;
    });
    return read && same ? std::optional<int>(static_cast<int>(*value)) : std::nullopt;
  }

  // That updates nothing: its epoch holds what was put.
  absl::Status Step() {
    client::StepCommand command;
    command.step = step_ + 1;
    const absl::Status status = job_.session().Step(command);
    if (!status.ok()) return status;
    ++step_;
    return job_.session().WaitDurable().status();
  }

  const std::string mode_;
  Job job_;
  uint64_t step_ = 0;
};

}  // namespace
}  // namespace offload

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc != 5) {
    std::fprintf(stderr, "usage: puts_writer POOL JOB loads|edits|looks FOLDER\n");
    return 2;
  }
  return offload::Writer(argv[1], argv[2], argv[3]).Run();
}
