// The peers of a build that has CUDA and no NCCL: every rank copies for itself.
#include "accelerator/cuda_peers.h"
#include "base/error.h"

namespace offload::accelerator {
namespace {

class NoPeers final : public Peers {
 public:
  std::string Address() const override { return ""; }
  bool CanAccess(const std::string&) const override { return false; }
  absl::StatusOr<std::string> MakeId(uint32_t) override { return Without(); }
  absl::StatusOr<std::unique_ptr<Collectives>> Join(const std::string&, uint32_t,
                                                    uint32_t) override {
    return Without();
  }

 private:
  static absl::Status Without() {
    return MakeError(ErrorId::kGpuPlugin, "liboffload_cuda.so was built without NCCL");
  }
};

}  // namespace

std::unique_ptr<Peers> MakeCudaPeers(int) { return std::make_unique<NoPeers>(); }

}  // namespace offload::accelerator
