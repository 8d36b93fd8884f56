/* Answers CPUID, which hidden_vnni.py replaced with a breakpoint, as a processor with AVX2 alone does. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <ucontext.h>

/* Bits of leaf 7: AVX-512 in all parts, VNNI, AMX, AVX-VNNI, AVX-IFMA, AVX10, GFNI. */
static const unsigned hidden[2][4] = {
    {0, 0xDC230000u, 0x00005942u, 0x03C0010Cu},
    {0x00800030u, 0, 0, 0x00080430u},
};

static void answer(int signal_number, siginfo_t *info, void *context)
{
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    unsigned leaf = registers[REG_RAX], part = registers[REG_RCX], values[4];
    __cpuid_count(leaf, part, values[0], values[1], values[2], values[3]);
    if (leaf == 7 && part < 2)
        for (int index = 0; index < 4; index++)
            values[index] &= ~hidden[part][index];
    registers[REG_RAX] = values[0];
    registers[REG_RBX] = values[1];
    registers[REG_RCX] = values[2];
    registers[REG_RDX] = values[3];
    (void)signal_number, (void)info;
}

__attribute__((constructor)) static void begin(void)
{
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGTRAP, &action, 0);
}
