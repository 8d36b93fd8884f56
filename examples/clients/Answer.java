// Sends a photograph and prints the answer, which is JSON. Java 11 or later, no library.
// Usage: java Answer.java http://127.0.0.1:8000 MODEL PHOTO.jpg [TOKEN]
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Path;

public class Answer {
    public static void main(String[] arguments) throws Exception {
        var address = arguments[0] + "/v2/models/" + arguments[1] + "/answer";
        var request = HttpRequest.newBuilder(URI.create(address))
                .version(HttpClient.Version.HTTP_1_1)
                .header("Content-Type", "image/jpeg")
                .POST(HttpRequest.BodyPublishers.ofFile(Path.of(arguments[2])));
        if (arguments.length > 3) {
            request.header("Authorization", "Bearer " + arguments[3]);
        }
        var response = HttpClient.newHttpClient().send(request.build(), HttpResponse.BodyHandlers.ofString());
        System.out.println(response.body());
        System.exit(response.statusCode() == 200 ? 0 : 1);
    }
}
