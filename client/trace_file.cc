#include "client/trace_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/error.h"

namespace offload::client {
namespace {

constexpr char kBegin[] = "{\"traceEvents\":[\n";
constexpr size_t kPieceBytesMax = 1 << 20;

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char byte : text) {
    if (byte == '"' || byte == '\\') quoted += '\\';
    if (static_cast<unsigned char>(byte) < 0x20) {
      absl::StrAppendFormat(&quoted, "\\u%04x", byte);
    } else {
      quoted += byte;
    }
  }
  return quoted + "\"";
}

// Microseconds, as the format has them.
std::string Microseconds(int64_t nanoseconds) {
  return absl::StrFormat("%d.%03d", nanoseconds / 1000, nanoseconds % 1000);
}

std::string Metadata(const char* what, uint32_t process, uint32_t thread, const std::string& name) {
  return absl::StrCat("{\"ph\":\"M\",\"name\":\"", what, "\",\"pid\":", process,
                      ",\"tid\":", thread, ",\"args\":{\"name\":", Quoted(name), "}}");
}

std::string EndOfDocument(uint64_t dropped) {
  return absl::StrCat(
      "\n],\"displayTimeUnit\":\"ms\",\"otherData\":{\"clock\":\"CLOCK_MONOTONIC\","
      "\"dropped_events\":",
      dropped, "}}\n");
}

}  // namespace

std::string ToJson(const TraceEvent& event, const std::vector<std::string>& tensor_names) {
  const bool has_tensor = event.tensor < tensor_names.size();
  const std::string tensor = has_tensor ? tensor_names[event.tensor] : "";
  std::string json = absl::StrCat(
      "{\"ph\":\"", std::string(1, event.type), "\",\"cat\":\"", event.category,
      "\",\"name\":", Quoted(event.name[0] == 0 ? tensor : event.name), ",\"pid\":", event.process,
      ",\"tid\":", event.thread, ",\"ts\":", Microseconds(event.begin_nanoseconds));
  if (event.type == 'X')
    absl::StrAppend(&json, ",\"dur\":", Microseconds(event.duration_nanoseconds));
  if (event.type == 'f') json += ",\"bp\":\"e\"";
  if (event.type != 'X' && event.type != 'C') absl::StrAppend(&json, ",\"id\":", event.id);
  if (event.type == 'C') return absl::StrCat(json, ",\"args\":{\"bytes\":", event.bytes, "}}");
  if (!has_tensor && event.bytes == 0) return json + "}";
  json += ",\"args\":{";
  if (has_tensor) absl::StrAppend(&json, "\"tensor\":", Quoted(tensor));
  if (event.bytes > 0) {
    absl::StrAppend(&json, has_tensor ? "," : "", "\"extent\":", event.extent,
                    ",\"bytes\":", event.bytes);
  }
  return json + "}}";
}

std::string TracePath(const std::string& path, uint32_t rank, uint32_t session) {
  const std::filesystem::path given(path);
  std::string suffix;
  if (rank > 0) absl::StrAppend(&suffix, ".rank", rank);
  if (session > 1) absl::StrAppend(&suffix, ".", session);
  std::filesystem::path named = given;
  named.replace_filename(given.stem().string() + suffix + given.extension().string());
  return named;
}

absl::StatusOr<std::unique_ptr<TraceFile>> TraceFile::Create(const std::string& path) {
  UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file.valid()) {
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat("the trace ", path, " cannot be written: ", ErrnoText(errno)),
                     "Set OFFLOADD_TRACE to a file in a directory that exists, or to nothing");
  }
  std::unique_ptr<TraceFile> trace(new TraceFile(path, std::move(file)));
  trace->events_.reserve(kEventsMax);
  trace->writing_.reserve(kEventsMax);
  trace->piece_ = kBegin;
  trace->SetTensorNames({});
  return trace;
}

void TraceFile::SetTensorNames(std::vector<std::string> names) {
  auto shared = std::make_shared<const std::vector<std::string>>(std::move(names));
  absl::MutexLock lock(&mutex_);
  tensor_names_ = std::move(shared);
}

void TraceFile::NameProcess(uint32_t process, const std::string& name) {
  AddText(Metadata("process_name", process, 0, name));
}

void TraceFile::NameThread(uint32_t process, uint32_t thread, const std::string& name) {
  AddText(Metadata("thread_name", process, thread, name));
}

void TraceFile::Add(const TraceEvent& event) {
  absl::MutexLock lock(&mutex_);
  if (events_.size() < kEventsMax) {
    events_.push_back(event);
  } else {
    ++dropped_;
  }
}

void TraceFile::AddDropped(uint64_t count) {
  absl::MutexLock lock(&mutex_);
  dropped_ += count;
}

void TraceFile::AddText(const std::string& object) {
  absl::StrAppend(&piece_, has_objects_ ? ",\n" : "", object);
  has_objects_ = true;
}

absl::Status TraceFile::Write() {
  std::shared_ptr<const std::vector<std::string>> tensor_names;
  {
    absl::MutexLock lock(&mutex_);
    std::swap(events_, writing_);
    tensor_names = tensor_names_;
  }
  absl::Status status;
  for (const TraceEvent& event : writing_) {
    if (failed_ || end_ + piece_.size() >= kFileBytesMax) {
      AddDropped(1);
      continue;
    }
    AddText(ToJson(event, *tensor_names));
    if (piece_.size() >= kPieceBytesMax) status.Update(WritePiece());
  }
  writing_.clear();
  status.Update(WritePiece());
  return status;
}

// One call for the piece and the end of the document: whoever reads, or kills, finds it whole.
absl::Status TraceFile::WritePiece() {
  if (failed_) return absl::OkStatus();
  uint64_t dropped = 0;
  {
    absl::MutexLock lock(&mutex_);
    dropped = dropped_;
  }
  const std::string bytes = piece_ + EndOfDocument(dropped);
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t length = ::pwrite(file_.get(), bytes.data() + done, bytes.size() - done,
                                    static_cast<off_t>(end_ + done));
    if (length < 0 && errno == EINTR) continue;
    if (length <= 0) {
      failed_ = true;
      return MakeError(ErrorId::kBadValue, absl::StrCat("the trace ", path_, " ends here: ",
                                                        ErrnoText(length < 0 ? errno : ENOSPC)));
    }
    done += static_cast<size_t>(length);
  }
  end_ += piece_.size();
  piece_.clear();
  return absl::OkStatus();
}

}  // namespace offload::client
