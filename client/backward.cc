#include "client/backward.h"

namespace offload::client {
namespace {

thread_local bool is_in_backward = false;

}  // namespace

void SetBackward(bool in_backward) { is_in_backward = in_backward; }
bool IsInBackward() { return is_in_backward; }

}  // namespace offload::client
