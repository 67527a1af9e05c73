// A test is a block of code with a name; the first requirement that does not hold ends the program.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

struct Test {
  const char* name;
  std::function<void()> run;
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Register {
  Register(const char* name, std::function<void()> run) { tests().push_back({name, std::move(run)}); }
};

#define TEST(name)         \
  static void name();      \
  static const Register register_##name(#name, name); \
  static void name()

#define REQUIRE(holds)                                                                 \
  do {                                                                                 \
    if (!(holds)) {                                                                    \
      std::printf("%s:%d: %s does not hold\n", __FILE__, __LINE__, #holds);            \
      std::exit(1);                                                                    \
    }                                                                                  \
  } while (0)

// What the call throws, by its text; "" when it throws nothing of this type.
template <class Error, class Call>
std::string thrown(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline int run_all() {
  for (const Test& test : tests()) {
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.run();
  }
  return 0;
}
