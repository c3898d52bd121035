// The one exception type of the library. It never crosses the C boundary: see `ort::ReturnStatus`.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace sparseconv {

// Something that the user can mend; the message says what was wanted, what was found and what to do.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
std::string Concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <typename... Parts>
[[noreturn]] void Fail(const Parts&... parts) {
  throw Error(Concat(parts...));
}

}  // namespace sparseconv
