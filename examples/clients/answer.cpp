// Sends a photograph and prints the answer, which is JSON.
// Build: g++ -std=c++17 answer.cpp -lcurl -o answer
// Usage: ./answer http://127.0.0.1:8000 MODEL PHOTO.jpg [TOKEN]
#include <curl/curl.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <string>

static size_t append(char *data, size_t size, size_t count, void *text) {
    static_cast<std::string *>(text)->append(data, size * count);
    return size * count;
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    std::ifstream file(argv[3], std::ios::binary);
    const std::string photo((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    const std::string address = std::string(argv[1]) + "/v2/models/" + argv[2] + "/answer";
    std::string answer;

    CURL *curl = curl_easy_init();
    curl_slist *fields = curl_slist_append(nullptr, "Content-Type: image/jpeg");
    if (argc > 4) fields = curl_slist_append(fields, (std::string("Authorization: Bearer ") + argv[4]).c_str());
    curl_easy_setopt(curl, CURLOPT_URL, address.c_str());
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, fields);
    curl_easy_setopt(curl, CURLOPT_POSTFIELDS, photo.data());
    curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(photo.size()));
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, append);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, &answer);
    const CURLcode result = curl_easy_perform(curl);
    long status = 0;
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
    curl_slist_free_all(fields);
    curl_easy_cleanup(curl);

    if (result != CURLE_OK) std::cerr << curl_easy_strerror(result) << '\n';
    std::cout << answer << '\n';
    return result == CURLE_OK && status == 200 ? 0 : 1;
}
