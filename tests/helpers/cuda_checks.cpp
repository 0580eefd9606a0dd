// What a GPU punishes and fibers hide: the checks of CUDA functions that run on the host with `--cuda-checks`.
//
// g++ calls a function before each access to memory (-fsanitize=thread), and one for each misaligned pointer, index out
// of an array and overflow (-fsanitize=alignment and others).  Those functions are here, in the place of the compiler's
// own libraries: they know blocks, barriers and the arrays of a launch.  This file itself is compiled without.
//
// Two accesses to an element are a race if one of them writes, not both are atomic, and nothing orders them: blocks are
// never ordered, threads of a block by __syncthreads alone, lanes of a warp by __syncwarp, too.  Shuffles order no
// memory.  What races does not depend on the order in which the threads happen to run here.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

extern "C" const char __ehdr_start[] __attribute__((visibility("hidden")));  // where this library begins

namespace checks {
enum Kind { READ, WRITE, ATOMIC };
static const char* const KINDS[] = {"read", "write", "atomic access"};
static const size_t MOST_FINDINGS = 8;

struct Access {
    unsigned int block;  // from 1 on; 0: there was none
    unsigned int thread, barriers, warp_barriers;
    int place;
};
// The last access, and the last one before it of another thread of its warp, of another warp, and of another block.
// Whether any access races with a new one can be told from these: all others are ordered with it if these are.
struct Last {
    Access of[4];
};
struct Element {
    Access write;
    Last reads, atomics;
};
struct Region {
    const char* first;
    size_t bytes, size;  // size of an element; 0: everybody may read it, and nothing is recorded
    unsigned int block;  // of shared memory: the block that has it; 0: an array of the launch
    Element* elements;
};
static std::vector<Region> regions;
static std::vector<std::string> findings;
static const char *stacks, *stacks_end;
static Access now;

bool watching;

static int place_of(const void* address) { return (int)((const char*)address - __ehdr_start - 1); }

// At a place, and at that of another access if there is one (else 0); each once.
static void report(const std::string& what, int place, int other = 0, const std::string& more = "") {
    const std::string key = std::to_string(place) + "\t" + std::to_string(other) + "\t" + what;
    for (const std::string& each : findings)
        if (each.compare(0, key.size(), key) == 0) return;
    if (findings.size() == MOST_FINDINGS) return;
    findings.push_back(key + more + "\tblock " + std::to_string(now.block - 1) + ", thread " + std::to_string(now.thread));
}
bool report(const char* what, const void* place) {
    report(std::string(what), place_of(place));
    return true;
}

static bool races(const Access& before) {
    if (before.block == 0) return false;
    if (before.block != now.block) return true;
    if (before.thread == now.thread || before.barriers != now.barriers) return false;
    return before.thread / 32 != now.thread / 32 || before.warp_barriers == now.warp_barriers;
}
static const Access* racing(const Last& last) {
    for (const Access& each : last.of)
        if (races(each)) return &each;
    return nullptr;
}
static void note(Last& last) {
    const Access before = last.of[0];
    last.of[0] = now;
    if (before.block == 0 || (before.block == now.block && before.thread == now.thread)) return;
    const int distance = before.block != now.block ? 3 : before.thread / 32 != now.thread / 32 ? 2 : 1;
    last.of[distance] = before;
    for (int nearer = 1; nearer < distance; nearer++) last.of[nearer] = {};
}

static Region* region_of(const char* p) {
    for (Region& each : regions)
        if (p >= each.first && p < each.first + each.bytes) return &each;
    return nullptr;
}

static void access(const void* address, size_t bytes, Kind kind, const void* caller) {
    const char* const p = (const char*)address;
    if (!watching || (p >= stacks && p < stacks_end)) return;
    now.place = place_of(caller);
    Region* const region = region_of(p);
    if (!region || p + bytes > region->first + region->bytes || (!region->size && kind != READ)) {
        report(std::string(KINDS[kind]) + " outside of all arrays", now.place);
        return;
    }
    if (region->block && region->block != now.block) {
        report("shared memory of another block", now.place);
        return;
    }
    if (!region->elements) return;
    const size_t offset = p - region->first;
    for (size_t i = offset / region->size; i <= (offset + bytes - 1) / region->size; i++) {
        Element& element = region->elements[i];
        const Access* other = races(element.write) ? &element.write : nullptr;
        const char* before = KINDS[WRITE];
        if (!other && kind != READ && (other = racing(element.reads))) before = KINDS[READ];
        if (!other && kind != ATOMIC && (other = racing(element.atomics))) before = KINDS[ATOMIC];
        if (other)
            report(
                std::string("race: ") + KINDS[kind] + ", and " + before, now.place, other->place,
                " by block " + std::to_string(other->block - 1) + ", thread " + std::to_string(other->thread));
        if (region->block && kind == READ && !element.write.block && !element.atomics.of[0].block)
            report("read of shared memory that nobody has written", now.place);
        if (kind == WRITE) element.write = now;
        else note(kind == READ ? element.reads : element.atomics);
    }
}

void atomic(const void* p, size_t bytes, const void* caller) { access(p, bytes, ATOMIC, caller); }

void add_region(const void* first, size_t bytes, size_t size, bool recorded) {
    Element* const elements = recorded ? (Element*)calloc(bytes / size + 1, sizeof(Element)) : nullptr;
    regions.push_back({(const char*)first, bytes, size, 0, elements});
}
void share(void* variable, size_t bytes, size_t size) {
    const bool watched = watching;
    watching = false;
    Region* region = region_of((const char*)variable);
    if (!region) {
        add_region(variable, bytes, size, true);
        region = &regions.back();
    }
    if (region->block != now.block) {  // a block finds anything there; all bits set are NaN
        memset(variable, 0xff, bytes);
        memset(region->elements, 0, (bytes / size + 1) * sizeof(Element));
        region->block = now.block;
    }
    watching = watched;
}
void allow(const void* first, size_t bytes) { regions.push_back({(const char*)first, bytes, 0, 0, nullptr}); }
void use_stacks(const void* first, size_t bytes) {
    stacks = (const char*)first;
    stacks_end = stacks + bytes;
}
void resume(unsigned int block, unsigned int thread, unsigned int barriers, unsigned int warp_barriers) {
    now = {block + 1, thread, barriers, warp_barriers, 0};
}
}  // namespace checks

// What Python calls.
extern "C" {
// Before a launch: its arrays, and whether races for their elements are looked for.
void checks_begin(size_t count, const size_t* firsts, const size_t* bytes, const size_t* sizes, int recorded) {
    for (checks::Region& each : checks::regions) free(each.elements);
    checks::regions.clear();
    checks::findings.clear();
    for (size_t i = 0; i < count; i++)
        checks::add_region((const void*)firsts[i], bytes[i], sizes[i], recorded);
}
// After it: what was found, each "place, place of another access or 0, what, who" by tabs, and null behind the last.
const char* checks_finding(size_t number) {
    return number < checks::findings.size() ? checks::findings[number].c_str() : nullptr;
}

// What the compiler calls.
#define HERE __builtin_return_address(0)
#define ACCESSES(bytes)                                                                          \
    void __tsan_read##bytes(void* p) { checks::access(p, bytes, checks::READ, HERE); }           \
    void __tsan_write##bytes(void* p) { checks::access(p, bytes, checks::WRITE, HERE); }         \
    void __tsan_unaligned_read##bytes(void* p) { checks::access(p, bytes, checks::READ, HERE); } \
    void __tsan_unaligned_write##bytes(void* p) { checks::access(p, bytes, checks::WRITE, HERE); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, size_t bytes) { checks::access(p, bytes, checks::READ, HERE); }
void __tsan_write_range(void* p, size_t bytes) { checks::access(p, bytes, checks::WRITE, HERE); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define FAULT(name, what)                                     \
    void __ubsan_handle_##name() {                            \
        if (checks::watching) checks::report(what, HERE);     \
    }
FAULT(type_mismatch_v1, "misaligned pointer")
FAULT(out_of_bounds, "index outside of a fixed array")
FAULT(add_overflow, "overflow of +")
FAULT(sub_overflow, "overflow of -")
FAULT(mul_overflow, "overflow of *")
FAULT(negate_overflow, "overflow of a negation")
FAULT(divrem_overflow, "division by zero")
FAULT(shift_out_of_bounds, "shift by too many bits")
}
