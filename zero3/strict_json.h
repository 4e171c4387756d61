// zero3/strict_json.h
//
// The base of our JSON readers for files from elsewhere: every event is refused unless a derived
// class expects it. nlohmann's parser calls it event by event and never recurses, so neither size
// nor depth of the text costs memory that the reader did not ask for.
//
// Thread safety: one thread per handler.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace offload::zero3 {

class StrictJsonHandler {
 public:
  using number_integer_t = nlohmann::json::number_integer_t;
  using number_unsigned_t = nlohmann::json::number_unsigned_t;
  using number_float_t = nlohmann::json::number_float_t;
  using string_t = nlohmann::json::string_t;
  using binary_t = nlohmann::json::binary_t;

  virtual ~StrictJsonHandler() = default;

  virtual bool null() { return Refuse("null"); }
  virtual bool boolean(bool) { return Refuse("a boolean"); }
  virtual bool number_integer(number_integer_t) { return Refuse("a negative number"); }
  virtual bool number_unsigned(number_unsigned_t) { return Refuse("a number"); }
  virtual bool number_float(number_float_t, const string_t&) { return Refuse("a fraction"); }
  virtual bool string(string_t&) { return Refuse("a string"); }
  virtual bool binary(binary_t&) { return Refuse("binary data"); }
  virtual bool start_object(std::size_t) { return Refuse("an object"); }
  virtual bool key(string_t&) { return Refuse("a key"); }
  virtual bool end_object() { return Refuse("the end of an object"); }
  virtual bool start_array(std::size_t) { return Refuse("an array"); }
  virtual bool end_array() { return Refuse("the end of an array"); }

  // The parser's own complaint; `position` counts bytes.
  virtual bool parse_error(std::size_t position, const std::string&,
                           const nlohmann::detail::exception&) {
    return Fail("is no JSON at byte " + std::to_string(position));
  }

  // What was wrong; empty while nothing was.
  const std::string& error() const { return error_; }

 protected:
  // Where the reader is, for messages: "tensor \"x\"".
  virtual std::string Position() const = 0;

  bool Fail(std::string_view what) {
    if (error_.empty()) error_ = what;
    return false;
  }
  bool Refuse(std::string_view what) {
    return Fail("has " + std::string(what) + " where none belongs, at " + Position());
  }

 private:
  std::string error_;
};

// Reads `text` with the handler; false when the handler or the parser refused, with
// handler.error().
inline bool ReadStrictJson(std::string_view text, StrictJsonHandler& handler) {
  return nlohmann::json::sax_parse(text.begin(), text.end(), &handler) && handler.error().empty();
}

}  // namespace offload::zero3
