// swap/striped_device.h
//
// One device over several: the bytes of a store that spans pools. Transfers are cut at the stripe
// units, joined again per member, and run on all members at once.
//
// Invariants
//   * A flush completes when the flushes of all members have; it fails when one of them fails.
//   * An operation completes once, with the first error, when all its parts have completed: until
//   then its buffers are lent to the members.
//
// Thread safety: as Device.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "aio/device.h"
#include "swap/stripe_map.h"
#include "swap/wakeup.h"

namespace offload::swap {

struct StripeMember {
  std::unique_ptr<aio::Device> device;
  std::string name;           // what errors call it
  uint64_t offset_bytes = 0;  // of the member's part of the store in the device
};

class StripedDevice final : public aio::Device {
 public:
  // The members hold at least what the map says of a store of `size_bytes`.
  static absl::StatusOr<std::unique_ptr<StripedDevice>> Make(std::vector<StripeMember> members,
                                                             StripeMap map, uint64_t size_bytes);
  ~StripedDevice() override;

  size_t Poll(bool wait) override;
  int event_fd() const override { return polls_only_ ? -1 : wakeup_.fd(); }
  const aio::Geometry& geometry() const override { return geometry_; }
  std::string_view engine() const override { return members_.front().device->engine(); }
  void RegisterBuffer(std::span<std::byte> bytes) override;
  uint64_t registered_bytes() const override;

 protected:
  void Start(std::unique_ptr<Op> op) override;
  void SignalReady() override { wakeup_.Signal(); }

 private:
  // An operation, until the last of its parts has completed.
  struct Split {
    std::unique_ptr<Op> op;
    size_t parts_left = 1;  // ours, until all are started
    absl::Status status;
  };
  // A run of neighbouring bytes of one member.
  struct Part {
    uint64_t offset_bytes = 0;
    uint64_t size_bytes = 0;
    std::vector<iovec> pieces;
  };

  StripedDevice(std::vector<StripeMember> members, StripeMap map, const aio::Geometry& geometry,
                Wakeup wakeup, bool polls_only);
  void StartParts(const std::shared_ptr<Split>& split);
  void StartPart(const std::shared_ptr<Split>& split, uint32_t member, Part part);
  Done PartDone(const std::shared_ptr<Split>& split, uint32_t member);
  void FinishPart(Split& split);
  void WaitForAny();

  std::vector<StripeMember> members_;
  const StripeMap map_;
  const aio::Geometry geometry_;
  Wakeup wakeup_;
  const bool polls_only_;  // a member has no descriptor to wait on
  size_t completed_count_ = 0;
  bool started_in_poll_ = false;
};

}  // namespace offload::swap
