#include "accelerator/peers.h"

namespace offload::accelerator {

Peers* PeersOf(Accelerator* device) {
  auto* const among_others = dynamic_cast<PeerDevice*>(device);
  return among_others == nullptr ? nullptr : among_others->peers();
}

}  // namespace offload::accelerator
